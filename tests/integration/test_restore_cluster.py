"""`floe restore` on three servers, on older ones, and with the rights of its role."""

import asyncio
import json
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from common.archive.segment import Message
from common.clock import SystemClock
from common.errors import FloeError, Refused, Unavailable
from common.nats.api import RESTORE_KEY, RESTORE_PREFIX, create_consumer, create_stream, list_consumers, stream_info
from common.nats.client import frame
from common.nats.pull import StartAt, scan
from common.nats.restore import ArchiveUpload
from infra.local.nats import NatsCluster, NatsServer, nats_server_binary
from infra.rights import ROLES, RightsNames, SubjectRights, nats_conf
from tests.support import restoring as back
from tests.support.basics import PATIENCE, answered, soak_only, soon, unique
from tests.support.clock import ManualClock
from tests.support.egress import Bench, bench_of

pytestmark = pytest.mark.servers


async def lost(bench: Bench, count: int = 300, **config: object) -> tuple[str, list[Message], dict[str, object]]:
    """A stream with two consumers, archived, captured and deleted; its messages, and its state."""
    stream = await bench.make_stream(unique("R"), storage="file", **config)
    replicas = 3 if config.get("retention") == "interest" else 0  # the server demands as many as of the stream
    for name in ("one", "two"):
        pulled = {"durable_name": name, "ack_policy": "explicit", "num_replicas": replicas}
        await answered(lambda to=pulled: create_consumer(bench.client, stream, to))
    await bench.publish(stream, [b"%d" % n * (n % 40) for n in range(count)])
    await bench.client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": count})
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 11})
    await bench.freeze({"stream": stream, "start_time": "2020-01-01T00:00:00Z"})
    await back.capture(bench, stream, count)
    before, state = await back.contents(bench, stream), await back.state(bench, stream)
    await bench.delete_stream(stream)
    return stream, before, state


@pytest.mark.parametrize(("count", "retention"), [(300, "interest"), soak_only(300_000, "limits")])
async def test_each_of_three_replicas_holds_it(
    clustered: Bench, cluster: NatsCluster, count: int, retention: str
) -> None:
    bench = clustered
    stream, before, state = await lost(bench, count, num_replicas=3, retention=retention)
    report = await back.comes_back(bench, stream, before)
    assert sorted(report.comparison.copies) == sorted(server.name for server in cluster.servers)
    for server in cluster.servers:
        assert await copy_of(bench, stream, server.name, count) == before
    assert await back.state(bench, stream) == state
    assert [*await back.positions(bench, stream)][-2:] == ["one", "two"]  # before them that of egress
    await bench.publish(stream, [b"next"])
    assert await bench.last(stream) == count + 1


async def test_a_restore_that_the_servers_still_abort_is_waited_for(clustered: Bench) -> None:
    """For some seconds they refuse its name, and report nothing of it."""
    bench = clustered
    stream, before, _ = await lost(bench, num_replicas=3)
    config = {"name": stream, "subjects": [f"{stream}.>"], "num_replicas": 3, "metadata": {RESTORE_KEY: "0"}}
    begun = await bench.client.api(f"STREAM.RESTORE.{stream}", {"config": config, "state": {"messages": 1}})
    assert begun["deliver_subject"]
    await back.comes_back(bench, stream, before)


async def test_the_first_bytes_wait_until_a_server_passes_them_on(
    clustered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, subject = clustered, unique("late")
    async with aclosing(ArchiveUpload(bench.client, "S", unique("never"), ManualClock())) as upload:
        await upload.send(b"head")
        with pytest.raises(Unavailable, match="is gone"):
            await upload.finish()
    monkeypatch.setattr("common.nats.restore.FIRST_PIECE_TIMEOUT_S", PATIENCE)
    async with aclosing(ArchiveUpload(bench.client, "S", subject, SystemClock())) as upload:
        await upload.send(b"head")
        begun = asyncio.create_task(upload.finish())
        await asyncio.sleep(0.3)
        got = list[bytes]()

        def answer(_subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
            got.append(payload)
            bench.client.send(frame(reply, b"" if payload else b"{}"))

        await bench.client.subscribe_raw(subject, answer)
        await begun
    assert got == [b"head", b""]


POINTS = ("sending", "sent", "filled", "settled", "compared", "recorded")  # in the order of a restore


class StepDowns:
    """Make the leader of the stream step down at the failpoints of a restore that are in `waiting`, once at each.

    `agreed`: the number of accepted step-downs; `in_use`: the states of the stream whenever it had no marker.
    """

    def __init__(self, bench: Bench, stream: str) -> None:
        self._client, self._stream, self._inbox = bench.client, stream, bench.client.new_inbox()
        self.waiting, self.agreed, self.in_use = set[str](), 0, set[tuple[int, int, int]]()

    def _answer(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        self.agreed += bool(json.loads(payload or b"{}").get("success"))

    def at(self, name: str) -> None:
        if (point := name.removeprefix("restore.")) in self.waiting:
            self.waiting.remove(point)
            subject = self._client.api_subject(f"STREAM.LEADER.STEPDOWN.{self._stream}")
            self._client.send(frame(subject.encode(), b"", None, self._inbox.encode()))

    async def watch(self) -> None:
        await self._client.subscribe_raw(self._inbox, self._answer)
        while True:
            with suppress(FloeError):
                info = await stream_info(self._client, self._stream)
                if info is not None and not info.restore_marker:
                    self.in_use.add((info.messages, info.first_sequence, info.last_sequence))
            await asyncio.sleep(0.02)


async def copy_of(bench: Bench, stream: str, server: str, until: int) -> list[Message]:
    """The messages of the replica on one server."""
    found = list[Message]()
    async with aclosing(scan(bench.client, stream, StartAt(1), until=until, server=server)) as pieces:
        async for piece in pieces:
            found += piece
    return found


@pytest.mark.parametrize(
    ("count", "moments"),
    [(300, [("sending", "filled")]), soak_only(20_000, [*((point,) for point in POINTS), POINTS])],
    ids=["short", "each"],
)
async def test_leaders_that_step_down_meanwhile_leave_a_whole_stream_or_a_guarded_one(
    clustered: Bench, cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch, count: int, moments: list[tuple[str, ...]]
) -> None:
    bench, servers = clustered, sorted(server.name for server in cluster.servers)
    stream, before, state = await lost(bench, count, num_replicas=3)
    leaders = StepDowns(bench, stream)
    watching = asyncio.create_task(leaders.watch())
    for module in ("fill", "restore"):
        monkeypatch.setattr(f"ingress.recovery.{module}.failpoint", leaders.at)
    for points in moments:
        leaders.waiting = {*points}
        report = await answered(lambda: back.restored(bench, stream))  # it ends with 75
        assert report.exit_code == 0, [*report.lines()]
        assert (sorted(report.comparison.copies), leaders.waiting) == (servers, set())
        for server in servers:
            assert await copy_of(bench, stream, server, count) == before
        assert await back.state(bench, stream) == state
        assert [*await back.positions(bench, stream)] == ["one", "two"]
        await soon(lambda: leaders.in_use)
        await bench.delete_stream(stream)
    assert leaders.in_use == {(state["messages"], state["first_seq"], state["last_seq"])}
    assert leaders.agreed > 0  # while it is filled a stream has no leader that could
    watching.cancel()


@pytest.mark.parametrize("version", ["2.10", soak_only("2.11"), soak_only("2.12"), "2.14"])
async def test_older_servers_take_it_too_leave_sequences_out_and_push_again(tmp_path: Path, version: str) -> None:
    with NatsServer(binary=nats_server_binary(version)) as server:
        async with bench_of(server.url, tmp_path) as bench:
            stream, before, state = await lost(bench)
            assert (await back.comes_back(bench, stream, before)).format == "files"
            assert await back.state(bench, stream) == state
            assert sorted(await back.positions(bench, stream)) == ["one", "two"]
            await pushes_and_skips(bench)


async def pushes_and_skips(bench: Bench, **config: object) -> None:
    """A lost stream with a push consumer, archived up to 20 and seen at 30: it delivers again, and continues at 31."""
    stream, received = await bench.make_stream(unique("R"), storage="file", **config), list[bytes]()
    pushed = {"durable_name": "push", "ack_policy": "none", "deliver_subject": f"push.{stream}"}
    await answered(lambda: create_consumer(bench.client, stream, pushed))
    await bench.publish(stream, [b"%d" % n for n in range(20)])
    await bench.freeze({"stream": stream})
    await bench.publish(stream, [b"lost"] * 10)
    await back.capture(bench, stream, 20, deletions=True)
    await bench.delete_stream(stream)
    await bench.client.subscribe_raw(f"push.{stream}", lambda _s, _r, payload, _h: received.append(payload))
    report = await back.restored(bench, stream, skip_to=0, allow_elsewhere=True)
    assert (report.exit_code, report.plan.last_sequence, report.not_kept) == (0, 30, ()), [*report.lines()]
    await bench.publish(stream, [b"new"])
    await soon(lambda: received == [*(b"%d" % n for n in range(20)), b"new"])
    assert (await back.state(bench, stream))["last_seq"] == 31
    [consumer] = await list_consumers(bench.client, stream)
    assert consumer["config"]["deliver_subject"] == f"push.{stream}"


async def test_three_servers_leave_sequences_out_and_push_again(clustered: Bench) -> None:
    await pushes_and_skips(clustered, num_replicas=3)


async def test_with_exactly_the_rights_of_its_role_and_each_missing_one_is_named(tmp_path: Path) -> None:
    role = next(role for role in ROLES if role.name == "restore")
    rule, *others = role.nats
    with NatsServer() as plain:
        async with bench_of(plain.url, tmp_path) as beside:
            stream, before, _ = await lost(beside)
    names = RightsNames(stream=stream)
    server = NatsServer()
    users = ["{user: all, password: secret}"]
    for number, _ in enumerate([*rule.subjects, None]):
        left = tuple(subject for at, subject in enumerate(rule.subjects) if at != number)
        rights = [SubjectRights(left), *others]
        (server.folder / f"u{number}.conf").write_text(nats_conf(replace(role, nats=tuple(rights)), names))
        users.append(f"{{ user: u{number}, password: secret\ninclude u{number}.conf\n}}")
    server.extra = "authorization { users: [ " + "\n".join(users) + "\n] }"
    with server:
        async with bench_of(server.url, tmp_path, user="all", password="secret") as bench:
            for number, subject in enumerate(map(names.fill, rule.subjects)):
                if "CONSUMER.DELETE" in subject:
                    continue  # the server removes it after a minute
                if "STREAM.DELETE" in subject:  # which only a leftover needs
                    guard = {"subjects": [f"{RESTORE_PREFIX}{stream}"], "metadata": {RESTORE_KEY: "0123"}}
                    await create_stream(bench.client, {"name": stream, **guard})
                with pytest.raises(Refused) as caught:
                    await back.restored(bench, stream, nats={"user": f"u{number}", "password": "secret"})
                assert caught.value.exit_code == 77
                assert subject.removesuffix(">") in str(caught.value), subject
                if "STREAM.UPDATE" in subject:
                    assert await stream_info(bench.client, stream) is None, "found before anything is filled"
            await back.comes_back(bench, stream, before, nats={"user": f"u{len(rule.subjects)}", "password": "secret"})
