"""`floe export` writes what `nats backup restore stream` takes; `floe import` takes what nats-servers write."""

import json
import os
import re
from contextlib import aclosing
from pathlib import Path

import pytest

from common.archive.segment import Message
from common.nats.api import create_consumer, query, stream_info
from common.nats.client import FloeClient
from infra.local.nats import NatsServer, nats_server_binary
from tests.support import restoring as back
from tests.support.basics import soak_only, soon, unique
from tests.support.commands import configuration, floe, ran
from tests.support.egress import Bench
from tests.support.nats_cli import nats, require_nats
from tests.support.servers import connected

pytestmark = pytest.mark.servers

#: Leases of commands, apart from those of egress: work in a busy process may be late.
LEASES = {"lease_bucket": unique("L"), "lease_ttl": "10s"}


async def used(bench: Bench, count: int) -> str:
    """A stream with gaps, headers and TTLs, and a consumer in the middle of it."""
    stream = await back.awkward(bench, count, allow_msg_ttl=True)
    for ttl in ("1h", "never"):
        await bench.publish(stream, [b"expires"], headers=b"NATS/1.0\r\nNats-TTL: %s\r\n\r\n" % ttl.encode())
    await create_consumer(bench.client, stream, {"durable_name": "pull", "ack_policy": "explicit"})
    await back.consume(bench, stream, "pull", 40)
    return stream


async def back_up(client: FloeClient, stream: str, folder: Path) -> Path:
    """Write a backup as `nats backup stream` does, in the form of the server."""
    pieces, ended = list[bytes](), list[bool]()

    def take(_subject: bytes, reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        pieces.append(payload)
        ended.extend([True] * (not payload))
        if reply:
            client.send(b"PUB %s 0\r\n\r\n" % reply)

    subscription = await client.subscribe_raw(inbox := client.new_inbox(), take)
    answer = await client.api(f"STREAM.SNAPSHOT.{stream}", {"deliver_subject": inbox, "chunk_size": 65536})
    await soon(lambda: ended)
    await subscription.unsubscribe()
    folder.mkdir()
    is_new = client.server_version >= (2, 15)
    (folder / ("stream.arc.s2" if is_new else "stream.tar.s2")).write_bytes(b"".join(pieces))
    (folder / "backup.json").write_text(json.dumps({key: answer[key] for key in ("config", "state")}))
    return folder


async def exported(bench: Bench, stream: str) -> Path:
    """Archive and export a stream; return the folder."""
    await back.archived(bench, stream)
    await ran("export", "-c", str(configuration(bench, {"stream": stream})), f"site/{stream}", str(bench.root / "b"))
    return bench.root / "b"


@pytest.mark.parametrize("count", [1500, soak_only(1_000_000)])
async def test_a_stream_goes_through_a_backup_and_back(alone: tuple[Bench, NatsServer], count: int) -> None:
    """Archive, export, `nats backup restore stream`, egress, restore; and the backup of `nats` holds the same."""
    bench, server = alone
    require_nats(build=count > 1500)
    stream = await used(bench, count)
    last = await back.archived(bench, stream)
    before, positions = await back.contents(bench, stream), await back.positions(bench, stream)
    file, ours, theirs = str(configuration(bench, {"stream": stream})), bench.root / "ours", bench.root / "theirs"
    done = (await ran("export", "-c", file, f"site/{stream}", str(ours), "--json")).json()
    assert (done["rows"], done["first"], done["end"]) == (len(before), before[0].sequence, last)
    await nats(server.url, "backup", "stream", stream, str(theirs), "--no-progress")
    for folder in (theirs, ours):
        await nats(server.url, "backup", "validate", str(folder))
        await bench.delete_stream(stream)
        await nats(server.url, "backup", "restore", "stream", str(folder), "--no-progress")
        assert await back.contents(bench, stream) == before
        assert await back.positions(bench, stream) == positions
    feed = {"stream": stream, "name": "again"}
    await bench.freeze(feed)
    await bench.delete_stream(stream)
    await ran("restore", "-c", str(configuration(bench, feed, **LEASES)), "site/again", "--yes")
    assert await back.contents(bench, stream) == before
    assert await back.state(bench, stream) == done_state(before, last)


def done_state(rows: list[Message], last: int) -> dict[str, int]:
    first = rows[0].sequence
    return {"messages": len(rows), "first_seq": first, "last_seq": last, "num_deleted": last - first + 1 - len(rows)}


@pytest.mark.parametrize("version", ["", "2.14", "2.10"])
async def test_an_archive_begins_with_a_backup_of_any_server(tmp_path: Path, version: str) -> None:
    with NatsServer(binary=nats_server_binary(version)) as server:
        async with aclosing(await connected(server.url)) as client:
            bench = Bench(server.url, tmp_path, client)
            stream = await back.awkward(bench, 600)
            await create_consumer(client, stream, {"durable_name": "push", "deliver_subject": "push.here"})
            folder = await back_up(client, stream, tmp_path / "b")
            before, info = await back.contents(bench, stream), await stream_info(client, stream)
            await bench.publish(stream, [b"later"] * 5)
            await client.api(f"STREAM.PURGE.{stream}", {"seq": 400})

            file = str(configuration(bench, {"stream": stream}, **LEASES))
            done = (await ran("import", "-c", file, str(folder), f"site/{stream}", "--json")).json()
            assert (done["messages"], done["left_out"], done["leftover"]) == (len(before), 0, "")
            assert bench.messages(stream) == before
            document = bench.chains.read_stream(bench.chain(stream))
            kept = json.loads((folder / "backup.json").read_text())["config"]
            assert (document.importing, document.config) == ("", kept)
            assert (document.created == info.created) == bool(version), "2.15 keeps it in no backup"
            assert await bench.mark(stream) == info.last_sequence

            # The stream holds less by now, and egress continues where the backup ends.
            await bench.freeze({"stream": stream})
            assert [m.payload for m in bench.messages(stream)[len(before) :]] == [b"later"] * 5
            bench.check(stream, first=101)
            again = await floe("import", "-c", file, str(folder), f"site/{stream}")
            assert (again.code, "E-IMPORT-BEGUN" in again.err) == (1, True), again


@pytest.mark.parametrize("point", ["sent", "begun", "read", "removed", "visible"])
async def test_a_killed_import_is_no_archive_and_the_same_command_continues(bench: Bench, point: str) -> None:
    stream = await bench.filled([b"%d" % n for n in range(2000)], storage="file")
    folder, before = await exported(bench, stream), await back.contents(bench, stream)
    feed = {"stream": stream, "name": "imported", "segment": {"max_messages": 500}}
    file = str(configuration(bench, feed))
    with NatsServer() as server:
        words = "import", "-c", file, str(folder), "site/imported", "--server", server.url
        killed = await floe(*words, env={**os.environ, "FLOE_FAILPOINTS": f"import.{point}=kill"})
        assert killed.code == -9, killed
        left = {each.site: each for each in bench.chains.chains("site", "imported")}
        assert bool(left) == (point == "visible"), "only a whole chain is visible"
        if point != "sent":
            async with bench.egress(feed) as running:
                assert (await running.stopped("imported"))["code"] == "E-IMPORT-UNFINISHED"
        await ran(*words)
        async with aclosing(await connected(server.url)) as client:
            assert (await query(client, "INFO"))["streams"] == 0
    assert bench.messages("imported") == before
    await bench.publish(stream, [b"next"])
    await bench.freeze(feed)
    assert bench.messages("imported")[-1].payload == b"next"


async def test_what_cannot_be_imported_or_exported_is_refused_by_name(bench: Bench, tmp_path: Path) -> None:
    stream = await bench.filled([b"1", b"2"])
    folder = await exported(bench, stream)
    sampled = {"stream": stream, "name": "s", "inspect_field": "a", "inspect_duration": "1h"}
    parts = {"stream": stream, "name": "p", "partitions": ["a", "b"]}
    other = {"stream": "OTHER", "name": "o"}
    file = str(configuration(bench, {"stream": stream}, sampled, parts, other, **LEASES))
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    damaged.mkdir()
    (damaged / "backup.json").write_bytes((folder / "backup.json").read_bytes())
    (damaged / "stream.arc.s2").write_bytes((folder / "stream.arc.s2").read_bytes()[:-20])
    refusals = [
        (("import", str(folder), "site/s"), 2, "sampled (inspect_field)"),
        (("import", str(folder), "site/p"), 2, "2 partitions"),
        (("import", str(folder), "site/o"), 2, "stream OTHER"),
        (("import", str(folder), "elsewhere/x"), 2, "site"),
        (("import", str(folder), "site/x/0001"), 2, "first incarnation"),
        (("import", str(empty), "site/x"), 2, "backup.json"),
        (("import", str(damaged), "site/x"), 3, "E-IMPORT-REFUSED"),
        (("import", str(folder), "site/x", "--server", "http://x"), 2, "--server: expected nats://HOST:PORT"),
        (("import", str(folder), "site/x", "--server", str(bench.url)), 78, "account without streams"),
        (("import", str(folder), f"site/{stream}"), 1, "E-IMPORT-BEGUN"),
        (("export", f"site/{stream}", str(folder)), 2, "expected an empty folder"),
        (("export", f"site/{stream}", str(folder / "backup.json")), 2, "expected a folder"),
        (("export", f"site/{stream}", "x", "--to-sequence", "1", "--until", "1h ago"), 2, "one of"),
    ]
    for words, code, text in refusals:
        done = await floe(words[0], "-c", file, *words[1:])
        assert (done.code, text in done.err) == (code, True), (words, done)
    assert [*bench.chains.chains("site", "x")] == []
    await ran("import", "-c", file, str(folder), "site/x")


async def test_a_part_is_exported_and_a_killed_export_is_no_backup(bench: Bench, tmp_path: Path) -> None:
    stream = await bench.filled([b"%d" % n for n in range(14)])
    await bench.publish(stream, [b"%d" % n for n in range(6)], subject="b")
    await back.archived(bench, stream)
    file, folder = str(configuration(bench, {"stream": stream}, **LEASES)), str(tmp_path / "b")
    words = "export", "-c", file, f"site/{stream}", folder, "--to-sequence", "15"
    shown = (await ran(*words, "--dry-run", "--json")).json()
    assert (shown["rows"], shown["end"], os.path.exists(folder)) == (15, 15, False)
    assert (await floe(*words, env={**os.environ, "FLOE_FAILPOINTS": "restore.sent=kill"})).code == -9
    assert os.listdir(folder) == ["stream.arc.s2"]
    done = await ran(*words)
    assert re.search(rf"stream {stream}: 15 messages, .* in {re.escape(folder)}", done.out), done
    assert "a backup holds no time of creation" in done.err
    narrow = {"stream": stream, "name": "narrow", "filter_subject": f"{stream}.b"}
    await ran("import", "-c", str(configuration(bench, narrow, **LEASES)), folder, "site/narrow")
    await ran("import", "-c", file, folder, "site/part")
    assert [[m.sequence for m in bench.messages(feed)] for feed in ("narrow", "part")] == [[15], [*range(1, 16)]]
