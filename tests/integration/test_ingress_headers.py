"""Headers that a server acts on: nothing at the target unless listed, and then what the source meant."""

from __future__ import annotations

import pytest

from common.jetstream.api import stream_info
from common.jetstream.client import FloeClient
from common.jetstream.pull import get_message
from tests.support.basics import soon
from tests.support.ingress import CHAIN, Centre, arrived, check_exact, count_in, make, rows_of
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]

# Everything that nats-server 2.15 acts on, with values that would drop, refuse, purge, expire or repeat.
ACTING = [
    b"Nats-Msg-Id: same",
    b"Nats-Expected-Stream: OTHER",
    b"Nats-Expected-Last-Sequence: 99999",
    b"Nats-Expected-Last-Subject-Sequence: 99999",
    b"Nats-Expected-Last-Subject-Sequence-Subject: a.b",
    b"Nats-Expected-Last-Msg-Id: nobody",
    b"Nats-Rollup: all",
    b"Nats-Rollup: sub",
    b"Nats-TTL: 1s",
    b"Nats-Marker-Reason: Purge",
    b"Nats-Incr: +5",
    b"Nats-Counter-Sources: {}",
    b"Nats-Batch-Id: b",
    b"Nats-Batch-Sequence: 7",
    b"Nats-Batch-Commit: 1",
    b"Nats-Schedule: @every 1s",
    b"Nats-Schedule-TTL: 1s",
    b"Nats-Schedule-Target: {target}.nodes.scheduled",
    b"Nats-Schedule-Source: {target}.nodes.1",
    b"Nats-Schedule-Rollup: sub",
    b"Nats-Schedule-Time-Zone: Europe/Zurich",
    b"Nats-Schedule-Next: purge",
    b"Nats-Scheduler: {target}.nodes.1",
    b"Nats-Stream-Source: X 1",
    b"Nats-Required-Api-Level: 99",
    b"Nats-Trace-Dest: somewhere",
    b"Nats-Trace-Only: true",
    b"Nats-Request-Info: {}",
]
AWKWARD = [
    b"plain",
    "zürich.straße".encode(),
    b"not.\xff\xfe.text",
    b"\xc3\x28",
    b"del.\x7f",
    b"bell.\x07.\x1b",
    b"star.*",
    b"rest.>",
    b"*",
    b"$JS.API.INFO",
    b"$SYS.x",
    b"_INBOX.a",
    b"deep." + b".".join(b"t" for _ in range(500)),
    b"l" * 3800,
]
ODD = [None, b"NATS/1.0\r\n\r\n", b"NATS/1.0 503 no\r\n\r\n", b"NATS/1.0\r\nno end"]
FORGED = b"Floe-Source: mars NODES 0000 0 1 1"
MARK = b"KV-Operation: PURGE"  # read by clients only


def block(*lines: bytes) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


ALLOWED = ("atomic", "batched", "direct", "msg_ttl", "rollup_hdrs", "msg_schedules")
EVERYTHING = dict.fromkeys([f"allow_{each}" for each in ALLOWED], True)


@pytest.mark.parametrize("publisher", ["fast", "atomic", "single"])
async def test_headers_act_only_where_listed(client: FloeClient, centre: Centre, publisher: str) -> None:
    centre.having(publisher=publisher)
    lines = [line.replace(b"{target}", centre.target.encode()) for line in ACTING]
    rows = [message(n, headers=block(b"A: 1", line, MARK)) for n, line in enumerate(lines, 1)]
    rows += [message(n, headers=block(line.lower())) for n, line in enumerate(lines, 101)]
    more = [block(*lines), block(*lines), *ODD, block(FORGED, b"A: 1", b"a:  2  ", b"A:", b"A: 1")]
    rows += [message(n, b"x" * (n % 2), headers=each) for n, each in enumerate(more, 201)]
    rows += [message(n, subject=subject) for n, subject in enumerate(AWKWARD, 301)]
    centre.archive.put(rows)

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        messages = await centre.carried(client, len(rows))
    centre.archive.rows[CHAIN] = rows[: -len(AWKWARD)]  # of the others the subject is no JSON: see below
    check_exact(messages[: -len(AWKWARD)], centre.archive, centre.prefix)
    info = await stream_info(client, centre.target)
    assert (info.last_sequence, info.messages) == (len(rows), len(rows))
    for sequence, row in enumerate(rows, 1):
        stored = await get_message(client, centre.target, sequence)
        assert stored.subject == centre.prefix + row.subject
        own, _, of_source = (stored.headers or b"").partition(b"\r\nFloe-Source: ")
        assert b"\r\nnats-" not in of_source.lower()
        assert b"Nats-TTL" not in own


def listing(centre: Centre, *headers: str) -> None:
    """Give the centre one source, of which these headers act."""
    centre.target_settings["sources"][0] |= {"site": "us-east", "control_headers": [*headers]}


@pytest.mark.real
async def test_a_listed_ttl_expires_and_every_other_value_is_text(client: FloeClient, centre: Centre) -> None:
    """What the server would refuse, overflow included, is no header: it would be refused for ever."""
    text = [b"1s ", b"1d", b"0", b"-1", b"soon", b"", b"1.5s", b"999999999h", b"9999999999", b"\t1s", b"1s\t"]
    acting = [b"1s", b"1", b"  1s", b"never", b"999999h", b"99999999m", b"999999999s", b"999999999"]
    rows = [message(n, headers=block(b"Nats-TTL: " + value)) for n, value in enumerate(text + acting, 1)]
    rows.append(message(len(rows) + 1, headers=block(b"Nats-TTL: 1s", b"Nats-TTL: never")))
    centre.archive.put(rows)
    listing(centre, "Nats-TTL")

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        await soon(lambda: _last(client, centre, len(rows)))
        await soon(lambda: _count(client, centre, len(rows) - 4))
        left = {each.message.sequence for each in await arrived(client, centre.target)}
        first = len(text) + 1
        assert left == set(range(1, len(rows) + 1)) - {first, first + 1, first + 2, len(rows)}
        # The arithmetic holds though messages are gone: what follows stands behind them.
        centre.archive.put(rows_of(len(rows) + 1, len(rows) + 10))
        await soon(lambda: _last(client, centre, len(rows) + 10))
    state = (await (await centre.state(client)).load()).state
    assert state.checkpoint.target_sequence == len(rows) + 10


async def _last(client: FloeClient, centre: Centre, sequence: int) -> bool:
    info = await stream_info(client, centre.target)
    assert info is None or info.last_sequence <= sequence
    return info is not None and info.last_sequence == sequence


async def _count(client: FloeClient, centre: Centre, count: int) -> bool:
    return await count_in(client, centre.target) == count


@pytest.mark.parametrize("publisher", ["fast", "single"])
async def test_a_listed_rollup_purges_no_sequences(client: FloeClient, centre: Centre, publisher: str) -> None:
    subjects = [b"a", b"a", b"b", b"a", b"c", b"a", b"b", b"b", b"c"]
    headers: list[bytes | None] = [None] * len(subjects)
    headers[3] = block(b"Nats-Rollup: sub")
    headers[4] = block(b"Nats-Rollup: SUB")
    headers[7] = block(b"Nats-Rollup: everything")
    headers[8] = block(b"Nats-Marker-Reason: Purge")
    rows = [
        message(n, subject=b"nodes." + subject, headers=lines)
        for n, (subject, lines) in enumerate(zip(subjects, headers, strict=True), 1)
    ]
    centre.archive.put(rows)
    listing(centre.having(publisher=publisher), "Nats-Rollup", "Nats-Marker-Reason")

    await make(client, centre, **EVERYTHING)
    async with centre.running():
        await soon(lambda: _last(client, centre, 9))
        left = [each.message.sequence for each in await arrived(client, centre.target)]
        assert left == [3, 4, 5, 6, 7, 8, 9]
        stored = await get_message(client, centre.target, 9)
        assert b"\r\nNats-Marker-Reason: Purge\r\n" in (stored.headers or b"")
        centre.archive.put([message(10, headers=block(b"Nats-Rollup: all")), *rows_of(11, 12)])
        await soon(lambda: _last(client, centre, 12))
    left = [each.message.sequence for each in await arrived(client, centre.target)]
    assert left == [10, 11, 12]
    state = (await (await centre.state(client)).load()).state
    assert (state.checkpoint.positions[CHAIN], state.checkpoint.target_sequence) == (13, 12)
