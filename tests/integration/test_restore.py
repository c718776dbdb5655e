"""`floe restore`: a lost stream comes back unchanged, and egress continues."""

import asyncio
import os
import pty
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from common.archive.captures import CapturedConsumer, CapturedConsumers, CaptureStore
from common.archive.heartbeats import ChainHeartbeat, HeartbeatObject
from common.archive.segment import Message, SegmentRef
from common.chain import Chain
from common.clock import NS_PER_S, SystemClock, format_time
from common.errors import ConfigError, DataError, OutcomeUnknown, Stopped, Unavailable, UsageError
from common.nats.api import RESTORE_KEY, RESTORE_PREFIX, create_consumer, create_stream, list_consumers, stream_info
from common.nats.kv import state_key
from common.nats.lease import new_owner, open_leases
from common.tasks import Stop
from infra.local.nats import NatsServer, nats_server_binary
from infra.local.process import spawn
from tests.support import restoring as back
from tests.support.basics import PATIENCE, commands_of, raises_code, soak_only, soon, unique
from tests.support.commands import ROOT, configuration, floe, ran
from tests.support.egress import Bench
from tests.support.ingress import client_of

pytestmark = pytest.mark.servers


EXPLICIT = {"ack_policy": "explicit"}


async def loses(bench: Bench, stream: str) -> list[Message]:
    """Archive, capture and delete the stream, and return its messages."""
    await back.archived(bench, stream)
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    return before


async def lost(
    bench: Bench, *payloads: bytes, consumers: dict[str, dict[str, Any]] | None = None, **config: Any
) -> tuple[str, list[Message]]:
    """A stream of some messages that is archived and gone, and its messages."""
    stream = await bench.make_stream(unique("R"), **config)
    for name, consumer in (consumers or {}).items():
        await create_consumer(bench.client, stream, {"durable_name": name, **consumer})
    await bench.publish(stream, payloads or [b"1", b"2"])
    return stream, await loses(bench, stream)


async def whole(bench: Bench, stream: str) -> list[Any]:
    return [await reader(bench, stream) for reader in (back.contents, back.state, back.config)]


@pytest.mark.parametrize("count", [1500, soak_only(300_000)])
async def test_a_lost_stream_comes_back_as_it_was(alone: tuple[Bench, NatsServer], count: int) -> None:
    bench, server = alone
    stream = await back.awkward(bench, count)
    kinds = {"pull": {"ack_policy": "explicit"}, "push": {"ack_policy": "explicit", "deliver_subject": "push.here"}}
    for name, config in kinds.items():
        await create_consumer(bench.client, stream, {"durable_name": name, **config})
    await create_consumer(bench.client, stream, {"name": "passing", "inactive_threshold": 300_000_000_000})
    await back.consume(bench, stream, "pull", 40)
    last = await back.archived(bench, stream)
    before = await whole(bench, stream)
    before_positions = await back.positions(bench, stream)
    await bench.delete_stream(stream)

    file = str(configuration(bench, {"stream": stream}))
    shown = await floe("restore", "-c", file, f"site/{stream}", "--dry-run", "--json")
    assert (shown.code, shown.json()["end"], shown.json()["first"]) == (0, last, 101), shown
    assert await stream_info(bench.client, stream) is None
    done = await ran("restore", "-c", file, f"site/{stream}", "--json", "--yes", "--allow-elsewhere")
    document, rows = done.json(), len(before[0])
    assert (document["ok"], document["read_back"], document["sent_rows"], document["rows"]) == (True, rows, rows, rows)
    assert shown.json()["archived_rows"] == document["archived_rows"] == shown.json()["rows"]

    assert await whole(bench, stream) == before
    del before_positions["passing"]
    assert await back.positions(bench, stream) == before_positions
    following = next(m for m in before[0] if m.sequence > before_positions["pull"][1])
    assert await back.consume(bench, stream, "pull", 1) == [following.payload]
    for name, config in kinds.items():  # the application declares its own, and nothing is wrong
        await create_consumer(bench.client, stream, {"durable_name": name, **config})
    await bench.publish(stream, [b"next"])
    assert await bench.last(stream) == last + 1
    await asyncio.to_thread(server.restart)
    assert (await soon(lambda: back.contents(bench, stream)))[:-1] == before[0]


async def test_a_point_in_time_by_sequence_and_by_time(bench: Bench) -> None:
    stream = await bench.make_stream(unique("R"))
    await create_consumer(bench.client, stream, {"durable_name": "c", "ack_policy": "explicit"})
    await bench.publish(stream, [b"%d" % n for n in range(100)])
    await back.consume(bench, stream, "c", 20)
    async with bench.egress({"stream": stream}):
        await bench.archived_to(stream, 100)
        await back.capture(bench, stream, 100)
        await asyncio.sleep(0.01)
        middle = time.time_ns()
        await asyncio.sleep(0.01)
        await bench.archive(stream, [b"%d" % n for n in range(100, 200)], 200)
    before = await back.contents(bench, stream)
    await back.consume(bench, stream, "c", 100)
    await back.capture(bench, stream, 200)
    await bench.delete_stream(stream)
    with pytest.raises(UsageError, match=format_time(before[0].timestamp_ns)):
        await back.planned(bench, stream, to_time_ns=before[0].timestamp_ns)
    plan = await back.planned(bench, stream, to_time_ns=middle)
    assert (plan.end, plan.archived_end) == (100, 200)
    assert any("E-ROLLED-BACK" in note for note in plan.notes)  # egress has archived more
    await back.comes_back(bench, stream, before[:100], to_time_ns=middle)
    await back.comes_back(bench, stream, before[:150], to_sequence=150)
    assert (await back.positions(bench, stream))["c"] == (20, 20, 20, 20)  # the capture at 200 is later
    # Under another name it is a separate stream, with other subjects while its own are not free.
    with raises_code(ConfigError, "E-RESTORE-SUBJECTS", 78) as caught:
        await back.restored(bench, stream, name=(beside := unique("B")), to_sequence=150)
    assert await stream_info(bench.client, beside) is None, "found before anything is filled"
    offered = f"--as {beside}_RESTORED --subjects '{beside}_RESTORED.>' --to-sequence 150"
    assert f" site/{stream} {offered}\n" in caught.value.hint
    other, subjects = f"{beside}_RESTORED", (f"{beside}_RESTORED.>",)
    assert (await back.restored(bench, stream, name=other, subjects=subjects, to_sequence=150)).exit_code == 0
    assert (await back.config(bench, other))["subjects"] == [*subjects]
    assert await back.contents(bench, other) == before[:150]
    assert await back.positions(bench, other) == {"c": (20, 20, 20, 20)}


async def test_a_stream_that_was_never_archived_is_not_taken_for_an_empty_one(bench: Bench) -> None:
    stream = await bench.make_stream(unique("N"))
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.state(stream) == "reading")
    await bench.publish(stream, [b"%d" % n for n in range(60)])
    await create_consumer(bench.client, stream, {"durable_name": "app", "ack_policy": "explicit"})
    await back.consume(bench, stream, "app", 40)
    await back.capture(bench, stream, 0)
    await bench.delete_stream(stream)
    why = r"no message of the stream is archived; it was at 40 .*: 1\.\.40 "
    with raises_code(Stopped, "E-RESTORE-LOSSY", match=why):
        await back.restored(bench, stream)
    assert await stream_info(bench.client, stream) is None
    assert (await back.restored(bench, stream, allow_lossy=True)).exit_code == 0
    assert (await back.planned(bench, stream)).lossy == (), "since the restore it is an empty one"


async def test_the_plan_shows_how_far_egress_and_neighbours_had_read_the_stream(bench: Bench) -> None:
    stream = await bench.make_stream(unique("R"), storage="file")
    async with bench.egress({"stream": stream}):
        await bench.archive(stream, [b"%d" % n for n in range(50)], 50)
    chain, now = bench.chain(stream), time.time()
    for process, last, incarnation in (("one", 50, 0), ("other", 60, 0), ("of another life", 99, 1)):
        at = Chain(chain.site, chain.feed, incarnation)
        heartbeat = ChainHeartbeat("reading", now, "", "", 50, last, now, 1, chain=at)
        bench.chains.write_heartbeat(process, HeartbeatObject(chain.site, "o", now, (heartbeat,)))
    source = {"name": "JS_SRC_k3", "metadata": {"_nats.src.stream": "COPY"}}
    read = CapturedConsumers("2026-01-02T03:04:05Z", 50, (CapturedConsumer(source, "2026-01-02T03:04:05Z", 55, 55),))
    CaptureStore(bench.chains.layout, bench.objects).put(chain, read)
    await bench.delete_stream(stream)
    report = await back.restored(bench, stream)
    assert report.exit_code == 0
    assert "COPY had read up to 55 by JS_SRC_k3 (2026-01-02T03:04:05Z)" in report.plan.notes
    end_notes = [note for note in report.plan.notes if "the stream was at" in note]
    assert len(end_notes) == 1
    assert "was at 60" in end_notes[0]
    assert "nothing of 51..60 is archived" in end_notes[0]
    again = await back.planned(bench, stream)
    assert not any("the stream was at" in note for note in again.notes), "that was before the last restore"


async def test_a_work_queue_whose_deletions_were_not_captured_comes_back_with_done_work(bench: Bench) -> None:
    """A server lets nobody read a work queue without removing its messages."""
    queue = await bench.make_stream(unique("Q"), retention="workqueue", storage="file")
    async with bench.egress({"stream": queue, "capture_deletes": "never"}):
        await bench.archive(queue, [b"%d" % n for n in range(50)], 50)
        await soon(lambda: holds(bench, queue, 0))
    await bench.delete_stream(queue)
    report = await back.restored(bench, queue)
    assert (report.exit_code, report.rows) == (0, 50), [*report.lines()]
    assert "the state is as planned; no message was read back" in [*report.lines()]
    assert any(note.startswith("a work queue is read by its workers only") for note in report.plan.notes)
    assert await holds(bench, queue, 50)


async def holds(bench: Bench, stream: str, count: int) -> bool:
    info = await stream_info(bench.client, stream)
    return info is not None and info.messages == count


async def in_three(bench: Bench) -> tuple[str, list[Message], list[SegmentRef]]:
    """A lost stream of 300 messages, and the three segments that hold it."""
    stream = await bench.begun([b"%d" % n * 20 for n in range(300)], {"max_age": "1h", "max_messages": 100})
    before = await back.contents(bench, stream)
    await bench.delete_stream(stream)
    return stream, before, bench.refs(stream)


async def test_foreign_streams_are_untouched(bench: Bench) -> None:
    stream, _ = await lost(bench)
    await bench.make_stream(stream)
    await bench.publish(stream, [b"other"])
    with raises_code(ConfigError, "E-RESTORE-EXISTS", 78):
        await back.restored(bench, stream)
    assert [m.payload for m in await back.contents(bench, stream)] == [b"other"]
    file = configuration(bench, {"stream": stream})
    words = ("restore", "-c", str(file), f"site/{stream}", "--dry-run")
    there, asked = await asyncio.gather(floe(*words), floe(*words, "--json"))
    assert (there.code, asked.code) == (78, 78)
    assert "2 archived messages" in there.out
    assert "error[E-RESTORE-EXISTS]" in there.err
    assert (asked.json()["rows"], asked.json()["refused"]["code"]) == (2, "E-RESTORE-EXISTS")
    file.write_text(file.read_text().replace(bench.url, "nats://127.0.0.1:1"))
    away, named = await asyncio.gather(floe(*words), floe(*words, "--as", ""))
    assert (away.code, named.code) == (75, 2), away
    assert "2 archived messages" in away.out
    assert "--as: expected a stream name" in named.err
    for subjects, why in (
        ("$JS.>", "or a restore ($JS.>), found '$JS.>'"),
        (f"{RESTORE_PREFIX}x", f"or a restore ({RESTORE_PREFIX}>), found '{RESTORE_PREFIX}x'"),
        ("a.>,a.1", "do not overlap, found 'a.>' and 'a.1'"),
    ):
        done = await floe(*words, "--as", "X", "--subjects", subjects)
        assert (done.code, why in done.err) == (2, True), done


async def test_a_dry_run_shows_what_the_server_knows(bench: Bench) -> None:
    large, small = [(await lost(bench, b"x" * size, b"y" * size))[0] for size in (600_000, 10)]

    async def notes(stream: str, *more: str) -> str:
        file = str(configuration(bench, {"stream": stream}))
        done = await ran("restore", "-c", file, f"site/{stream}", "--dry-run", "--json", *more)
        return "\n".join(done.json()["notes"])

    first, second, third = await asyncio.gather(notes(large), notes(small), notes(small, "--format", "files"))
    assert ("max_payload" in first, "max_payload" in second) == (True, False)
    assert ("--format files prevents that" in second, "creates a new stream" in third) == (True, False)
    assert await stream_info(bench.client, small) is None


async def test_a_lack_of_room_at_server_or_account_is_named_at_once(bench: Bench) -> None:
    consumers, large = {"one": EXPLICIT, "two": EXPLICIT}, [b"%d" % n * 2000 for n in range(100)]
    stream, _ = await lost(bench, *large, consumers=consumers, storage="file")
    limits = {
        "small": ", jetstream: {max_file: 100000}",
        "enough": ", jetstream: {max_file: 10000000, max_streams: 2, max_consumers: 3}",
        "none": "",
    }
    accounts = [f"{k}: {{users: [{{user: {k}, password: p}}] {more}}}" for k, more in limits.items()]
    with NatsServer(extra=f"accounts {{ {', '.join(accounts)} }}") as server:
        login = {user: {"url": server.url, "user": user, "password": "p"} for user in limits}
        for user, code in (("enough", None), ("small", "E-RESTORE-ROOM")):
            work = back.restore(bench, stream, login[user])
            _, refused = await work.check(await work.plan())
            assert (refused and refused.code) == code, refused
        with raises_code(ConfigError, "E-JS-10039", 78, match="JetStream") as caught:
            await back.restored(bench, stream, nats=login["none"])
        # The leftovers of a killed restore make room, since they go first.
        async with client_of(server.url, user="enough", password="p") as client:
            guarded = {"name": stream, "subjects": [f"{RESTORE_PREFIX}{stream}"], "metadata": {RESTORE_KEY: "0123"}}
            await create_stream(client, guarded)
            await client.publish(f"{RESTORE_PREFIX}{stream}", b"x" * 3000)
            assert (await back.restored(bench, stream, nats=login["enough"])).is_promoted
    assert "enable JetStream for the account" in caught.value.hint


async def test_a_second_one_ends_at_once_and_leaves_the_first_alone(bench: Bench) -> None:
    stream, before = await lost(bench)
    settings = back.settings(bench, stream)
    leases = await open_leases(bench.client, settings.egress, new_owner("first"), SystemClock(), replicas=1)
    lease = await leases.acquire(state_key("restore", stream))
    keeping = asyncio.create_task(lease.run_renewals())
    metadata = {RESTORE_KEY: "0123 first=1 end=2"}
    guarded = {"name": stream, "subjects": [f"{RESTORE_PREFIX}{stream}"], "metadata": metadata}
    created = (await create_stream(bench.client, guarded)).created
    with raises_code(Unavailable, "E-RESTORE-RUNS", 75) as caught:
        await back.restored(bench, stream)
    assert "first on" in str(caught.value)
    info = await stream_info(bench.client, stream)
    assert (info.created, info.restore_marker) == (created, "0123 first=1 end=2")
    keeping.cancel()
    await lease.release()
    await back.comes_back(bench, stream, before)


async def test_a_stream_that_was_replaced_while_it_was_promoted_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = await lost(bench)
    work = back.restore(bench, stream)
    async with work.open_connection() as client:
        api = client.api

        async def late(name: str, request: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
            if name.startswith("STREAM.UPDATE"):
                await bench.delete_stream(stream)
                await bench.make_stream(stream, subjects=[f"{RESTORE_PREFIX}{stream}"])
            return await api(name, request, **more)

        monkeypatch.setattr(client, "api", late)
        with raises_code(Stopped, "E-RESTORE-REPLACED", 1, match="replaced while it was promoted"):
            await work.run(client, Stop())


async def test_deletions_by_retention_are_no_damage_and_it_begins_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, before, _ = await in_three(bench)
    work = back.restore(bench, stream, allow_lossy=True)
    async with work.open_connection() as client:
        api = client.api

        async def deleting(name: str, *rest: Any, **more: Any) -> dict[str, Any]:
            if name == "INFO" and (old := [r for r in bench.refs(stream) if r.coverage.last <= 200]):
                bench.chains.raise_floor(bench.chain(stream), 201)
                for ref in old:
                    (bench.root / "bucket" / ref.key).unlink()
            return await api(name, *rest, **more)

        monkeypatch.setattr(client, "api", deleting)
        report = await work.run(client, Stop())
    assert (report.exit_code, report.is_promoted, report.plan.begin) == (0, True, 201)
    assert any("retention deleted" in note for note in report.plan.notes)
    left = "after retention of the archive, and the stream at 1: up to 200 sequences of 1..200 not archived"
    assert report.plan.lossy == (f"site/{stream}/0000 begins at 201, {left}",)
    assert await back.contents(bench, stream) == before[200:]


async def test_damage_holes_and_a_tail_that_is_gone_stop_it_and_nothing_stays(bench: Bench) -> None:
    stream, before, (_, ref, last) = await in_three(bench)
    path = bench.root / "bucket" / ref.key
    whole = path.read_bytes()
    third = len(whole) // 3
    path.write_bytes(whole[:third] + bytes([whole[third] ^ 1]) + whole[third + 1 :])
    with pytest.raises(DataError, match=ref.name):
        await back.restored(bench, stream)
    assert await stream_info(bench.client, stream) is None
    path.write_bytes(whole[: len(whole) // 2])  # noticed before anything is sent
    assert any(ref.name in note for note in (await back.planned(bench, stream)).notes)
    with pytest.raises(Stopped):
        await back.restored(bench, stream)
    path.unlink()
    with raises_code(Stopped, "E-RESTORE-LOSSY", match=re.escape(str(ref.coverage))):
        await back.restored(bench, stream)
    await back.comes_back(bench, stream, [m for m in before if m.sequence not in ref.coverage], allow_lossy=True)
    (bench.root / "bucket" / last.key).unlink()
    await bench.delete_stream(stream)
    with pytest.raises(Stopped, match=r"covered up to 300, and its segments end at 100: 101\.\.300 is missing"):
        await back.restored(bench, stream)
    assert not (await back.planned(bench, stream, to_sequence=100)).lossy  # the lost rows are not requested
    await back.comes_back(bench, stream, before[:100], allow_lossy=True)
    assert await bench.last(stream) == 300  # its sequences are not given to others


async def test_losses_of_an_older_server_are_named_and_not_promoted_unless_allowed(bench: Bench) -> None:
    paused = {"paused": {**EXPLICIT, "pause_until": "2090-01-01T00:00:00Z"}}
    stream, _ = await lost(bench, consumers=paused, allow_msg_ttl=True, subject_delete_marker_ttl=60 * NS_PER_S)
    with NatsServer(binary=nats_server_binary("2.10")) as older:
        reports = []
        for asked in ({}, {"allow_lossy": True}):
            work = back.restore(bench, stream, {"url": older.url}, **asked)
            async with work.open_connection() as client:
                reports.append(await work.run(client, Stop()))
                info = await stream_info(client, stream)
            assert bool(info.restore_marker) is not reports[-1].is_promoted
    assert [(report.exit_code, report.is_promoted) for report in reports] == [(3, False), (0, True)]
    not_kept = {text.split()[text.split().index("expected") + 1] for text in reports[1].not_kept}
    assert not_kept == {"allow_msg_ttl", "pause_until", "subject_delete_marker_ttl"}


async def test_a_consumer_that_an_older_server_refuses_is_named_with_the_way_out(bench: Bench) -> None:
    ranked = {"ranked": {**EXPLICIT, "priority_groups": ["a"], "priority_policy": "prioritized"}}
    stream, _ = await lost(bench, consumers=ranked)
    with NatsServer(binary=nats_server_binary("2.11")) as older:
        work = back.restore(bench, stream, {"url": older.url})
        async with work.open_connection() as client:
            with raises_code(ConfigError, "E-RESTORE-REFUSED", match="unknown priority policy") as caught:
                await work.run(client, Stop())
            assert await stream_info(client, stream) is None
        assert (await back.restored(bench, stream, nats={"url": older.url}, consumers=False)).is_promoted
    assert re.search(rf"floe restore -c \S+ site/{stream} --no-consumers", str(caught.value.hint))


async def reaching(bench: Bench, **config: Any) -> tuple[str, list[Message], list[bytes]]:
    """A lost stream with two push consumers that had the first 3 of 6 messages, its messages, and those that the
    subject of the first one receives from now on.
    """
    stream, received = await bench.make_stream(unique("R"), storage="file", **config), list[bytes]()
    for name in ("first", "second"):
        pushed = {"durable_name": name, "ack_policy": "none", "deliver_subject": f"push.{name}.{stream}"}
        await create_consumer(bench.client, stream, pushed)
    subscriptions = [
        await bench.client.subscribe_raw(f"push.{name}.{stream}", lambda *_: None) for name in ("first", "second")
    ]
    await bench.publish(stream, [b"1", b"2", b"3"])
    await soon(lambda: has_delivered(bench, stream, 3))
    for each in subscriptions:
        await each.unsubscribe()
    await soon(lambda: is_unheard(bench, stream))
    await bench.publish(stream, [b"4", b"5", b"6"])
    before = await loses(bench, stream)
    await bench.client.subscribe_raw(f"push.first.{stream}", lambda _s, _r, payload, _h: received.append(payload))
    return stream, before, received


async def has_delivered(bench: Bench, stream: str, sequence: int) -> bool:
    return {at[1] for at in (await back.positions(bench, stream)).values()} == {sequence}


async def is_unheard(bench: Bench, stream: str) -> bool:
    """True once each push consumer knows that nobody listens: until then it would deliver."""
    return not any(each.get("push_bound") for each in await list_consumers(bench.client, stream))


async def deliveries(bench: Bench, stream: str) -> list[str]:
    return [each["config"]["deliver_subject"] for each in await list_consumers(bench.client, stream)]


async def test_effects_elsewhere_are_shown_and_permitted_before_anything_is_made(bench: Bench) -> None:
    up, again = await bench.make_stream(unique("UP")), unique("again")
    stream, before, received = await reaching(
        bench, sources=[{"name": up}], republish={"src": ">", "dest": f"{again}.>"}
    )
    file, site = str(configuration(bench, {"stream": stream})), f"site/{stream}"
    effects = [
        f"sources: takes messages from stream '{up}', all again: the archive has none of them",
        f"republish: sends each new message to '{again}.>' too",
        f"consumer first: deliver_subject 'push.first.{stream}'",
        f"consumer second: deliver_subject 'push.second.{stream}'",
    ]
    shown = await floe("restore", "-c", file, site, "--dry-run")
    assert [line for line in shown.out.splitlines() if "ELSEWHERE" in line] == [f"ELSEWHERE: {e}" for e in effects]
    for words in (("--yes",), ()):  # nor if nobody can be asked
        done = await ran("restore", "-c", file, site, *words, code=1)
        assert f"error[E-RESTORE-ELSEWHERE]: stream {stream}: " in done.err
        assert all(effect in done.err for effect in effects)
        assert f"floe restore -c {file} {site} --allow-elsewhere" in done.err
        assert await stream_info(bench.client, stream) is None
    await ran("drill", "-c", file, site, "--exact")
    bare = await floe("restore", "-c", file, site, "--replicas", "3", "--no-consumers", "--yes", "--allow-elsewhere")
    assert "--replicas 1 --no-consumers --allow-elsewhere" in bare.err
    assert received == []
    answers, terminal = pty.openpty()  # on a terminal, the answer is the permission
    try:
        main = "import sys; from floe import main; sys.exit(main())"
        words, pipe = [sys.executable, "-c", main, "restore", "-c", file, site], subprocess.PIPE
        process = spawn(words, cwd=ROOT, stdin=terminal, stdout=pipe, stderr=pipe, text=True)
        os.write(answers, b"y\n")
        _, output = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    finally:
        os.close(answers)
        os.close(terminal)
    assert process.returncode == 0, output
    assert "\n".join([*effects, f"restore the stream of {site}?"]) in output
    await soon(lambda: received == [b"4", b"5", b"6"])
    assert await deliveries(bench, stream) == [f"push.first.{stream}", f"push.second.{stream}"]
    assert (await back.contents(bench, stream))[:6] == before


async def test_push_consumers_deliver_once_their_subjects_are_free(bench: Bench) -> None:
    stream, before, received = await reaching(bench)
    file, everything = str(configuration(bench, {"stream": stream})), list[bytes]()
    words = ("restore", "-c", file, f"site/{stream}", "--yes", "--skip-to-sequence", "6", "--allow-elsewhere")
    listener = await bench.client.subscribe_raw(">", lambda subject, *_: everything.append(subject))
    held = await ran(*words, code=78)
    assert "error[E-RESTORE-DELIVER]" in held.err
    assert f"stream {stream}: is back and in use, but first, second cannot deliver yet" in held.err
    assert commands_of(held.err) == [f"floe restore -c {file} site/{stream} --skip-to-sequence 6 --allow-elsewhere"]
    assert await back.contents(bench, stream) == before
    assert not any(subject.startswith(RESTORE_PREFIX.encode()) for subject in everything)
    assert await deliveries(bench, stream) == [
        f"{RESTORE_PREFIX}{stream}.push.{n}.{stream}" for n in ("first", "second")
    ]
    # The captures of egress meanwhile do not change the configuration, and the archive may pass the skipped sequences.
    await bench.publish(stream, [b"7"])
    await bench.freeze({"stream": stream})
    await back.capture(bench, stream, 7)
    plan = await back.planned(bench, stream)
    pushed = [f"push.{name}.{stream}" for name in ("first", "second")]
    assert [each.config["deliver_subject"] for each in plan.consumers] == pushed
    await listener.unsubscribe()
    preview = await floe(*words, "--dry-run")
    assert "an earlier restore has brought it back; to do: let first, second deliver again" in preview.out
    done = await ran(*words)
    assert done.out == f"stream {stream}: was brought back earlier; delivering again: first, second\n"
    await soon(lambda: received == [b"4", b"5", b"6", b"7"])
    assert await deliveries(bench, stream) == [f"push.first.{stream}", f"push.second.{stream}"]
    await ran(*words, code=78)  # it is there, and nothing is left to do


async def test_answers_that_are_lost_while_it_and_its_push_consumers_get_their_subjects_are_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, before, received = await reaching(bench)
    work, lost = back.restore(bench, stream, allow_elsewhere=True), list[str]()
    async with work.open_connection() as client:
        api = client.api

        async def losing(name: str, request: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
            if not name.startswith("STREAM.UPDATE") and (request or {}).get("action") != "update":
                return await api(name, request, **more)
            lost.append(name)
            if len(lost) != 4:  # that of the second consumer never reaches the server at first
                await api(name, request, **more)
            raise OutcomeUnknown("the answer was lost")

        monkeypatch.setattr(client, "api", losing)
        report = await work.run(client, Stop())
    assert (report.exit_code, len(lost)) == (0, 5), [*report.lines()]
    await soon(lambda: received == [b"4", b"5", b"6"])
    assert await deliveries(bench, stream) == [f"push.first.{stream}", f"push.second.{stream}"]
    assert await back.contents(bench, stream) == before
