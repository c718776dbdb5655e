"""The defects that were found in stream-replicator, one test each: Floe has none of them.

The numbers are those of the list they come from. What is tested at length elsewhere is short here.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from common.chain import Chain
from common.jetstream.api import consumer_names, stream_info
from common.settings.root import Settings
from infra.oracle import archived, read_stream
from tests.support.basics import soon, unique
from tests.support.egress import SITE, Bench, Running
from tests.support.egress_process import FEED, Process, processes
from tests.support.ingress import Archive, Centre, count_in

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def sequences(bench: Bench, feed: str) -> list[int]:
    """Those of the rows; fails unless the archive accounts for all sequences."""
    bench.check(feed)
    return [message.sequence for message in bench.messages(feed)]


@pytest.mark.parametrize("key", [{"inspect_header": "Node"}, {"inspect_subject_token": 2}], ids=str)
async def test_header_and_subject_sampling_copy_everything(bench: Bench, key: dict[str, Any]) -> None:
    """Defect 1: the limiter was made for `inspect_field` only."""
    stream = await bench.make_stream(unique("T"))
    for _ in range(3):
        for node in range(10):
            await bench.publish(stream, [b"-"], subject=f"n{node}", headers=block(b"Node: n%d" % node))
    async with bench.egress({"stream": stream, **key, "inspect_duration": "1h"}):
        await bench.archived_to(stream, 30)
    assert sequences(bench, stream) == list(range(1, 11))
    assert bench.ledger(stream) == {"sampled_out": 20}


@pytest.mark.real
async def test_headers_are_replaced_and_ids_are_invented(bench: Bench) -> None:
    """Defect 2: ids, TTLs, `KV-Operation` and tracing were lost, and a second run stored everything again."""
    stream = await bench.make_stream(unique("T"), allow_msg_ttl=True)
    sent = [
        (b"{}", block(b"Nats-Msg-Id: one", b"traceparent: 00-4bf9-00f0-01", b"tracestate: a=1")),
        (b"{}", block(b"Via: a", b"via:  b ", b"Via:", b"Via: a")),
        (b"", block(b"KV-Operation: DEL")),
        (b"{}", block(b"Nats-TTL: 1h", b"Nats-Msg-Id: two")),
        (b"", block()),
        (b"{}", None),
    ]
    for payload, headers in sent:
        await bench.publish(stream, [payload], headers=headers)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, len(sent))
    assert [(message.payload, message.headers) for message in bench.messages(stream)] == sent

    centre = _centre_of(bench, stream)
    for _ in range(2):
        async with centre.running():
            arrived = await centre.carried(bench.client, len(sent))
            await _carried_all(centre, bench, Chain(SITE, stream), len(sent))
            assert await count_in(bench.client, centre.target) == len(sent)
        assert [(each.message.payload, each.message.headers) for each in arrived] == sent


def _centre_of(bench: Bench, stream: str) -> Centre:
    target = f"{stream}-FLEET"
    sources = [{"site": [SITE], "feed": [stream], "subject_prefix": target}]
    return Centre(bench.root, Archive(bench.root / "bucket"), str(bench.url), sources=sources, stream=target)


async def _carried_all(centre: Centre, bench: Bench, chain: Chain, last: int) -> None:
    """Wait until the centre has noted that the chain is carried so far."""

    async def has() -> bool:
        found = (await (await centre.state(bench.client)).load()).state
        return found is not None and found.checkpoint.positions == {chain: last + 1}

    await soon(has)


async def test_a_force_field_that_is_false_forces(bench: Bench) -> None:
    """Defect 3: that the field was there was enough."""
    stream = await bench.make_stream(unique("T"))
    documents: list[dict[str, Any]] = [{"id": "a"}]
    documents += [{"id": "a", "force": value} for value in (False, None, 0, "", [], {}, True, False)]
    await bench.publish(stream, (json.dumps(document).encode() for document in documents))
    feed = {"stream": stream, "inspect_field": "id", "inspect_force_field": "force", "inspect_duration": "1h"}
    async with bench.egress(feed):
        await bench.archived_to(stream, len(documents))
    assert sequences(bench, stream) == [1, 8]
    assert bench.ledger(stream) == {"sampled_out": 7}


# By the subject each takes. Partition 0 of the first and of the third write the same letters in a row, which
# begin the second's and, nearly, the fourth's.
NAMES = {"a": (SITE, "A_1"), "b": (SITE, "A_1_0"), "c": (f"{SITE}_A", "1"), "d": (SITE, f"floe_{SITE}_A_1")}


async def test_a_name_that_begins_like_a_consumer_is_taken_for_one(bench: Bench) -> None:
    """Defect 4: `strings.HasPrefix("SR_", name)`."""
    stream = await bench.make_stream(unique("T"), retention="workqueue")

    def start(*subjects: str) -> Running:
        (site,) = {NAMES[subject][0] for subject in subjects}
        feeds = [_filtered(stream, NAMES[subject][1], f"{stream}.{subject}") for subject in subjects]
        settings: Settings = bench.settings(*feeds).model_copy(update={"site": site})
        return bench.start(settings)

    async def send(text: str) -> None:
        for subject in NAMES:
            await bench.publish(stream, [f"{text} {subject} {n}".encode() for n in range(5)], subject=subject)

    async def is_left(count: int) -> bool:
        info = await stream_info(bench.client, stream)
        return info is not None and info.messages == count

    async def durables() -> set[str]:
        return set(await consumer_names(bench.client, stream))

    async def has_all() -> bool:
        return len(await durables()) == len(NAMES)

    running = [start("a", "b", "d"), start("c")]
    await soon(has_all)
    await send("first")
    await soon(lambda: is_left(0))
    for each in running:
        await each.drain()
    before = await durables()
    assert len(before) == len(NAMES)

    await send("second")
    for done, subjects in enumerate(("a", "c", "bd"), 1):
        others = await durables()
        one = start(*subjects)
        left = 20 - 5 * (4 if subjects == "bd" else done)
        await soon(lambda: is_left(left))  # noqa: B023
        await one.drain()
        assert len(await durables()) == len(NAMES)
        assert len(others - await durables()) <= len(subjects), "only its own are replaced"

    for subject, (site, feed) in NAMES.items():
        found = [message.payload for message in archived(bench.store, Chain(site, feed))]
        assert found == [f"{text} {subject} {n}".encode() for text in ("first", "second") for n in range(5)]


def _filtered(stream: str, name: str, subject: str) -> dict[str, Any]:
    return {"stream": stream, "name": name, "filter_subject": subject}


@pytest.mark.real
async def test_a_failover_between_stored_and_acknowledged_stores_twice(bench: Bench) -> None:
    """Defect 5: nothing but the acknowledgement said what was stored."""
    stream = await bench.make_stream(unique("T"), retention="workqueue")

    async def is_empty() -> bool:
        info = await stream_info(bench.client, stream)
        return info is not None and not info.messages

    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.before_ack=kill@2", lease_ttl="5s"))
        await soon(lambda: bench.chains.read_chain(bench.chain(stream)))
        async with bench.egress({"stream": stream, **FEED}, lease_ttl="5s"):
            await bench.publish(stream, (b"%d" % number for number in range(350)))
            assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
            await bench.archived_to(stream, 350)
            await soon(is_empty)
    assert [message.payload for message in bench.messages(stream)] == [b"%d" % n for n in range(350)]
    assert sum(len(ref.coverage) for ref in bench.refs(stream)) == 350, "no sequence was put twice"
    bench.check(stream)


@pytest.mark.parametrize("subject", ["", ">", "*.x", "*.x.>", "one.*"])
async def test_a_filter_is_required_and_wildcards_do_not_work(bench: Bench, subject: str) -> None:
    """Defect 6: no filter was refused, and the place to go on at was looked for on the wildcard itself."""
    stream = await bench.make_stream(unique("T"))
    matching = {
        "": {"one.x", "two.x", "one.y", "one.x.z"},
        ">": {"one.x", "two.x", "one.y", "one.x.z"},
        "*.x": {"one.x", "two.x"},
        "*.x.>": {"one.x.z"},
        "one.*": {"one.x", "one.y"},
    }[subject]
    feed = {"stream": stream, **({"filter_subject": f"{stream}.{subject}"} if subject else {})}
    sent: list[str] = []
    for _ in range(2):  # from nothing, and from where the first one stopped
        for each in ("one.x", "two.x", "one.y", "one.x.z"):
            await bench.publish(stream, [each.encode()] * 3, subject=each)
            sent += [each] * 3
        async with bench.egress(feed):
            await bench.archived_to(stream, len(sent))
    expected = [n for n, each in enumerate(sent, 1) if each in matching]
    assert sequences(bench, stream) == expected
    left_out = len(sent) - len(expected)
    assert bench.ledger(stream) == ({"not_matched": left_out} if left_out else {})


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
async def test_sampling_without_advisories_forgets_at_a_failover(bench: Bench, number: signal.Signals) -> None:
    """Defect 7: instances told each other who was seen where advisories were on, else not."""
    stream = await bench.make_stream(unique("T"))
    sampled = {"inspect_field": "id", "inspect_duration": "1h", "segment": {"max_age": "1s"}}
    disturbed = {"stream": stream, **sampled}
    nodes = [b'{"id": "n%d"}' % node for node in range(40)]
    with processes() as started:
        started.append(Process(bench, stream, feeds=[disturbed]))
        await bench.publish(stream, nodes[:20])
        await bench.archived_to(stream, 20)
        async with bench.egress(disturbed, lease_ttl="1s"):
            started[0].send(number)
            await started[0].ended()
            await bench.publish(stream, nodes)
            await bench.archived_to(stream, 60)
    undisturbed = {"stream": stream, "name": unique("WHOLE"), **sampled}
    async with bench.egress(undisturbed, lease_ttl="1s"):
        await bench.archived_to(undisturbed["name"], 60)
    assert sequences(bench, stream) == [*range(1, 21), *range(41, 61)]
    assert bench.messages(stream) == bench.messages(str(undisturbed["name"]))
    assert bench.ledger(stream) == {"sampled_out": 20}
    assert await read_stream(bench.client, stream, lambda _: None) == 60
