"""Every stop of egress has its command: it is run as a process, and the service continues exactly."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from common.archive.documents import StreamDocument
from common.archive.segment import Message
from common.audit import list_keys
from common.chain import Chain
from common.nats.client import FloeClient
from common.nats.kv import KeyValue
from common.nats.pull import get_message
from egress import deps, evidence
from egress.identity import identity_key
from egress.incarnations import Closings, HighWaterMarks
from infra.local.nats import NatsServer
from tests.support.basics import unique
from tests.support.commands import Done, configuration, floe, paste
from tests.support.egress import SITE, Bench
from tests.support.servers import restore_disk, save_disk

pytestmark = pytest.mark.simulated


async def archive(bench: Bench, stream: str, payloads: list[bytes]) -> None:
    """Publish and archive the payloads, in a segment of their own."""
    await bench.publish(stream, payloads)
    async with bench.egress({"stream": stream, "segment": {"max_age": "1h"}}) as running:
        await running.received(stream, await bench.last(stream))


async def exact(bench: Bench, stream: str, incarnation: int, first: int) -> None:
    """Check that the incarnation holds exactly the messages of the stream from `first` on."""
    bench.check(stream, incarnation, first)
    found = await bench.compare(stream, stream, incarnation, first=first)
    assert found.is_ok, found.report()


async def resolve(bench: Bench, name: str, *words: str, of: str = "") -> Done:
    """Run the command for this name, by default of the stream and of its feed."""
    return await floe("egress", "resolve", "-c", str(configuration(bench, {"stream": of or name})), name, *words)


async def refused(bench: Bench, stream: str, *words: str) -> str:
    """Return the error of a command that refuses to decide."""
    done = await resolve(bench, stream, *words)
    assert done.code == 2, done
    return done.err


# E-ROLLED-BACK


async def test_a_store_that_never_answers_fails_while_somebody_waits(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(deps, "VIEW_TIMEOUT_S", 0.2)
    stream = await bench.make_stream(unique("R"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {"access_key_id": "a", "secret_access_key": "b"}
        bench.store_config = {"url": "s3://floe", "endpoint_url": endpoint, **keys}
        done = await resolve(bench, stream)
    assert done.code == 75
    assert "no answer within 0.2 s, asked 2 times" in done.err


async def test_a_stream_set_back_resumes_at_its_fork_from_the_archive_unless_that_would_lose_messages(
    alone: tuple[Bench, NatsServer], tmp_path: Path
) -> None:
    bench, server = alone
    stream = await bench.begun([b"x %d" % i for i in range(10)], storage="file")
    await bench.publish(stream, [b"kept 11", b"kept 12"])
    saved = await save_disk(server, tmp_path)
    await archive(bench, stream, [b"lost"] * 3)
    await restore_disk(server, saved)
    new, from_ = "--new-incarnation", "--from"
    async with bench.egress({"stream": stream}) as running:
        assert f"{new} --from 13" in (await running.stopped(stream))["hint"]
        shown = await resolve(bench, stream)
        assert shown.code == 3
        for text in (
            "E-ROLLED-BACK: sequence 12 is as archived, but the stream ends at 12, the archive at 15",
            "nothing is repeated, and nothing lost but a message up to 12 that was never archived",
            "sequence 12: equal",
            "a new incarnation may begin within 1..13",
        ):
            assert text in shown.out
        assert (await resolve(bench, f"{SITE}/{stream}/0000/0", of=stream)).code == 3
        for wrong in (f"elsewhere/{stream}", f"{SITE}/{stream}/0007", f"{SITE}/{stream}/0000/7"):
            assert (await resolve(bench, wrong, of=stream)).code == 2, wrong
        assert "expected a sequence within 1..13, found 14" in await refused(bench, stream, new, from_, "14", "--yes")
        unasked = await refused(bench, stream, new, from_, "5")
        assert "expected --yes" in unasked
        assert "5..12 is archived already, and will be archived again" in unasked
        assert "the stream is rolled back" in await refused(bench, stream, "--same", "--yes")
        assert bench.chains.read_stream(bench.chain(stream, 1)) is None
        done = await resolve(bench, stream, new, "--yes", "--json")
        assert done.json() == {"decided": "new incarnation", "first": {"0": 13}}
        await bench.publish(stream, [b"more"] * 4)
        await bench.archived_to(stream, 16, incarnation=1)
    document = bench.chains.read_stream(bench.chain(stream, 1))
    assert (document.previous, document.continues_from, document.stream_first) == ({0: 15}, {0: 13}, 1)
    await exact(bench, stream, 1, 13)


async def test_a_stream_set_back_and_written_again_is_compared_row_by_row(alone, tmp_path: Path, monkeypatch):
    """One segment holds all, so no tip below its end decides; many of the archived messages are gone. The newest of
    them is deleted just after it was found to differ.
    """
    bench, server = alone
    stream = await bench.make_stream(unique("T"), storage="file")
    for subject, count in (("a", 60), ("b", 130), ("a", 10)):
        await bench.publish(stream, [b"kept"] * count, subject=subject)
    saved = await save_disk(server, tmp_path)
    await archive(bench, stream, [b"lost"] * 100)
    assert len(bench.refs(stream)) == 1
    await restore_disk(server, saved)
    await bench.publish(stream, [b"other"] * 200)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"filter": f"{stream}.b"})

    async def read_once(client: FloeClient, name: str, sequence: int) -> Message | None:
        found = await get_message(client, name, sequence)
        if found is not None and sequence == 300:
            await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 300})
        return found

    monkeypatch.setattr(evidence, "get_message", read_once)
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert "the first sequence that is not as archived is 201" in status["why"]
        hint = status["hint"]
        assert ("--new-incarnation --from 201" in hint, "--same" in hint) == (True, False)
        assert "--same is not possible: the stream is rolled back" in await refused(bench, stream, "--same", "--yes")
        (shown,) = (await resolve(bench, stream, "--json")).json()
        assert (shown["code"], shown["evidence"][0]) == ("E-ROLLED-BACK", {"sequence": 300, "held": "absent"})
        assert [each["options"] for each in shown["choices"]] == ["--new-incarnation --from 201"]
        await paste(bench, hint, {"stream": stream})
        await bench.archived_to(stream, 400, incarnation=1)
    await exact(bench, stream, 1, 201)


async def test_a_stream_set_back_stays_stopped_though_new_messages_pass_its_former_end(alone, tmp_path: Path) -> None:
    """And no message is left that could show it."""
    bench, server = alone
    stream = await bench.begun([b"x %d" % i for i in range(10)], storage="file")
    saved = await save_disk(server, tmp_path)
    await archive(bench, stream, [b"lost"] * 3)
    await restore_disk(server, saved)
    async with bench.egress({"stream": stream}) as running:
        await running.stopped(stream)
    await bench.publish(stream, [b"new"] * 7)
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 15})
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert "is rolled back: sequence 11 was not as archived, and nothing after it is since" in status["why"]
        await paste(bench, status["hint"], {"stream": stream})
        await bench.archived_to(stream, 17, incarnation=1)
    await exact(bench, stream, 1, 15)


# E-FORKED


async def test_an_old_incarnation_that_is_back_resumes_behind_its_archived_end(alone, tmp_path: Path):
    bench, server = alone
    stream = await bench.begun([b"first"] * 10, storage="file")
    saved = await save_disk(server, tmp_path)
    await bench.recreate(stream, [b"second"] * 4, storage="file")
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 4, incarnation=1)
    await restore_disk(server, saved)
    await bench.publish(stream, [b"third"] * 5)
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert "is forked: incarnation 0000 is back" in status["why"]
        assert bench.chains.read_stream(bench.chain(stream, 2)) is None
        await paste(bench, status["hint"], {"stream": stream})
        await bench.archived_to(stream, 15, incarnation=2)
    document = bench.chains.read_stream(bench.chain(stream, 2))
    assert (document.previous, document.continues_from, document.continued) == ({0: 4}, {0: 11}, 0)
    await exact(bench, stream, 2, 11)


# E-IDENTITY


async def test_a_stream_that_cannot_be_compared_is_the_same_by_an_operator_s_word(bench: Bench) -> None:
    """All archived messages are gone from it, and `created` differs; a later recreation is still noticed."""
    stream = await bench.begun([b"x"] * 10)
    drifted = StreamDocument({}, "2001-01-01T00:00:00Z", None).to_json()
    bench.objects.put(bench.chains.layout.stream_document(bench.chain(stream)), drifted)
    await bench.client.api(f"STREAM.PURGE.{stream}")
    await bench.publish(stream, [b"later"] * 5)
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert "cannot be identified" in status["why"]
        hint = status["hint"]
        assert "--new-incarnation --from 11\n" in hint
        assert "continues after 10: it holds no message up to there, so nothing is repeated or lost:\n" in hint
        assert hint.endswith("--same")
        await paste(bench, hint, {"stream": stream}, wanted="--same")
        await bench.archived_to(stream, 15)
        await bench.publish(stream, [b"more"] * 5)
        await bench.archived_to(stream, 20)
        assert bench.chains.read_stream(bench.chain(stream, 1)) is None
        await bench.recreate(stream, [b"second"] * 30)
        await bench.archived_to(stream, 30, incarnation=1)
    await exact(bench, stream, 1, 1)
    bench.check(stream)
    assert [m.sequence for m in bench.messages(stream)] == list(range(1, 21))


# E-MINT-INTERVAL (E-RECREATED: test_egress_stops.py)


async def test_a_stream_recreated_twice_within_an_hour_need_not_wait(bench: Bench) -> None:
    stream = await bench.begun([b"first"] * 10)
    async with bench.egress({"stream": stream}) as running:
        await bench.recreate(stream, [b"again"] * 5)
        await bench.archived_to(stream, 5, incarnation=1)
        await bench.recreate(stream, [b"again"] * 6)
        status = await running.stopped(stream)
        assert "recreated twice within an hour" in status["why"]
        assert bench.chains.read_stream(bench.chain(stream, 2)) is None
        await paste(bench, status["hint"], {"stream": stream})
        await bench.archived_to(stream, 6, incarnation=2)
    await exact(bench, stream, 2, 1)


# E-STATE-KV (E-LISTING and E-EMPTY-ARCHIVE: test_egress_histories.py)


@pytest.mark.parametrize("what", [Closings.key, identity_key, HighWaterMarks.key])
async def test_a_mark_or_decisions_that_cannot_be_read_stop_the_chain_and_are_forgotten_by_the_command_only(
    bench: Bench, what: Callable[[Chain], str]
) -> None:
    """B73."""
    stream = await bench.begun([b"x"] * 10)
    state = await KeyValue(bench.client, bench.state_bucket).ensure()
    await state.put(what(bench.chain(stream)), b"spoiled")
    async with bench.egress({"stream": stream}) as running:
        hint = (await running.stopped(stream))["hint"]
        assert (await state.get(what(bench.chain(stream)))).value == b"spoiled"
        await paste(bench, hint, {"stream": stream})
        await bench.publish(stream, [b"more"] * 5)
        await bench.archived_to(stream, 15)
    assert await bench.mark(stream) == 15
    await bench.same(stream, stream)


# Nothing to decide


async def test_a_feed_that_nothing_stops_is_left_alone(bench: Bench) -> None:
    stream = await bench.begun([b"x"] * 10)
    shown = await resolve(bench, stream, "--json")
    assert shown.code == 0
    assert [(each["code"], each["verdict"], each["choices"]) for each in shown.json()] == [("", "same", [])]
    assert "this feed is not stopped" in await refused(bench, stream, "--new-incarnation", "--yes")
    assert "--same is not possible" in await refused(bench, stream, "--same", "--yes")
    assert "nothing is wrong with its listing" in await refused(bench, stream, "--believe-listing", "--yes")
    assert not [*list_keys(bench.chains, 0, None)], "the audit has decisions only"
    none = await resolve(bench, "OTHER", of=stream)
    assert (none.code, f"expected one of {stream}" in none.err) == (2, True)


# E-EMPTY-ARCHIVE, of several incarnations


async def test_a_lost_bucket_is_accepted_once_for_all_incarnations_and_no_earlier_decision_counts(bench: Bench) -> None:
    """A decision to begin at a later sequence was made for an archive that had the earlier ones."""
    stream = await bench.begun([b"old"] * 10)
    await bench.recreate(stream, [b"new %d" % n for n in range(6)])
    feed = {"stream": stream, "on_recreated": "halt"}
    async with bench.egress(feed) as running:
        hint = (await running.stopped(stream))["hint"]
        await paste(bench, re.sub(r"--from \d+", "--from 5", hint), feed)
        await bench.archived_to(stream, 6, incarnation=1)
    for info in bench.objects.list(""):
        bench.objects.delete(info.key)

    async with bench.egress(feed) as running:
        assert (await running.stopped(stream))["code"] == "E-EMPTY-ARCHIVE"
        assert bench.chains.read_stream(bench.chain(stream)) is None, "not taken for a first start"
        config = str(configuration(bench, feed))
        shown = await floe("egress", "resolve", "-c", config, stream)
        assert "the archive up to 10 is lost for good" in shown.out
        assert (await floe("egress", "resolve", "-c", config, stream, "--all-incarnations")).code == 2
        await paste(bench, running.status(stream)["hint"], feed)
        await bench.archived_to(stream, 6)
    assert [message.sequence for message in bench.messages(stream, 0)] == [1, 2, 3, 4, 5, 6]
    assert (await floe("egress", "resolve", "-c", config, stream)).code == 0
