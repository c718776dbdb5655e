"""`floe status` of a site, of the centre, and of the archive if NATS does not answer."""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from html import unescape
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from common.archive.documents import ChainDocument, CompactionRun, TargetPositions
from common.chain import Chain
from common.nats.api import create_stream
from common.nats.client import FloeClient
from common.observe.monitor import Health, Monitor
from infra.local.process import free_port
from tests.support.basics import PATIENCE, soon
from tests.support.browser import CHROMIUM, bars, dom, table_rows
from tests.support.commands import Done, configuration, floe, spawned
from tests.support.egress import SITE, Bench
from tests.support.ingress import CHAIN, Archive, Centre, rows_of
from tests.support.segments import message

pytestmark = [pytest.mark.servers, pytest.mark.simulated]


def changed(config: Path, section: str, **keys: Any) -> str:
    """The path of the file, with these keys of a section."""
    document = yaml.safe_load(config.read_text())
    document.setdefault(section, {}).update(keys)
    config.write_text(yaml.safe_dump(document))
    return str(config)


@contextmanager
def served(health: Health, port: int = 0) -> Iterator[str]:
    """The address at which the pages of `health` are served; 0: on a free port."""
    with closing(Monitor(f"127.0.0.1:{port}", health)) as monitor:
        monitor.start()
        yield f"127.0.0.1:{monitor.port}"


async def test_a_site_shows_its_open_segment_and_how_far_it_is(bench: Bench) -> None:
    stream = await bench.filled([b"x" * 1000] * 30)
    feed = {"stream": stream, "segment": {"max_age": "1h", "max_messages": 25}}
    async with bench.egress(feed) as running:
        await soon(lambda: running.status(stream).get("end") == 25)  # later than the segment is in the bucket
        await soon(lambda: (running.status(stream).get("open_segment") or {}).get("messages") == 5)
        with served(running.health) as address:
            config = changed(configuration(bench, feed), "egress", monitor={"listen": address})
            done = await floe("status", "-c", config, "--json")
            table = await floe("status", "-c", config)
        [row] = done.json()
        assert (done.code, done.err, row["view"], row["known_from"]) == (0, "", "site", "monitor"), done
        assert (row["state"], row["archived"], row["source_sequence"], row["lag_sequences"]) == ("reading", 25, 30, 5)
        assert (row["open_segment"]["first"], row["open_segment"]["messages"]) == (26, 5)
        assert row["open_segment"]["bytes"] == 5 * (1000 + len(f"{stream}.a"))
        assert row["holder"].split("/")[-2] == str(os.getpid())
        header, line = table.out.splitlines()
        assert header.startswith("chain ")
        assert f"{SITE}/{stream}/0000/0" in line
        assert "5 messages, 4.9 KiB, " in line
        assert " or at 100 MiB" in line

        silent = await floe("status", "-c", config, "--json")
        [row] = silent.json()
        assert (silent.code, row["archived"], row["open_segment"]) == (0, 25, None)
        assert "open segments are unknown" in silent.err
    left = await floe("status", "-c", config, "--json")
    assert (left.code, left.json()[0]["state"], left.json()[0]["archived"]) == (3, "not held", 30)


async def test_a_site_without_its_store_makes_up_no_lag_and_a_file_of_both_shows_both(
    bench: Bench, centre: Centre, archive: Archive
) -> None:
    stream = await bench.filled([b"x"] * 5)
    store = {"url": "s3://archive", "endpoint_url": f"http://127.0.0.1:{free_port()}", "access_key_id": "a"}
    down = changed(configuration(bench, {"stream": stream}), "store", **store, secret_access_key="b")
    done = await floe("status", "-c", down, "--json")
    [row] = done.json()
    assert "the store does not answer: " in done.err, done
    assert (row["archived"], row["source_sequence"], row["lag_sequences"]) == (None, 5, None)
    archive.put(rows_of(1, 5))
    site = bench.document({"stream": stream}, monitor={"listen": ""})
    both = bench.root / "both.yaml"
    both.write_text(yaml.safe_dump({**site, **centre.document()}))
    both.chmod(0o600)
    done = await floe("status", "-c", str(both), "--json")
    assert done.code == 3, "nobody holds the lease of the site's feed"
    assert sorted({row["view"] for row in done.json()}) == ["centre", "site"]
    shown = (await floe("status", "-c", str(both))).out.splitlines()
    assert (shown[0], "centre:" in shown) == ("site:", True)


async def test_the_archive_is_shown_without_nats(centre: Centre, archive: Archive, client: FloeClient) -> None:
    archive.put(rows_of(1, 40))
    archive.put(rows_of(41, 70))
    config = centre.write()
    assert {row["view"] for row in (await floe("status", "-c", str(config), "--json")).json()} == {"centre"}

    only = await floe("status", "-c", str(config), "--archive", "--json")
    [row] = only.json()
    stored = sum(ref.size for ref in archive.store.list(CHAIN))
    assert (only.code, only.err) == (0, "NATS is not queried\n")
    assert (row["view"], row["archived"], row["segments"], row["bytes"]) == ("archive", 70, 2, stored)
    assert row["last_archived"].endswith("Z")
    assert (row["last_compaction"], row["last_compaction_exit_code"]) == (None, None)

    done = await floe("status", "-c", changed(config, "nats", url=f"nats://127.0.0.1:{free_port()}"))
    assert done.code == 75
    assert "only the archive is shown: nats server 127.0.0.1" in done.err
    assert [line.split()[:2] for line in done.out.splitlines()] == [["chain", "archived"], [str(CHAIN), "70"]]

    neither = str(centre.write(targets=[]))
    done = await floe("status", "-c", neither, "--json")
    assert (done.code, [row["view"] for row in done.json()]) == (0, ["archive"])

    for run, part in (
        (CompactionRun(1e9, 1.0, 0, 1e9), r"\d+d\w* ago"),
        (CompactionRun(1e9, 1.0, 75), "never, then exit code 75"),
    ):
        archive.documents.write_run(CHAIN.site, None, run)
        assert re.search(f" {part}$", (await floe("status", "-c", neither)).out, re.MULTILINE)
    [row] = (await floe("status", "-c", neither, "--json")).json()
    assert (row["last_compaction"], row["last_compaction_exit_code"]) == (None, 75)


async def one_row(centre: Centre) -> tuple[Done, dict[str, Any]]:
    """Return the finished command and the row of the only chain."""
    done = await floe("status", "-c", str(centre.write()), "--json")
    [row] = [row for row in done.json() if row["phase"] != "missing"]
    return done, row


async def test_a_chain_whose_tail_is_lost_is_shown_by_its_segments(centre: Centre, archive: Archive) -> None:
    """As in a bucket that was copied without its tails; until ingress reports its stop, not for a later state."""
    archive.put(rows_of(5, 20))
    archive.objects.delete(archive.documents.layout.tail(CHAIN))
    done, row = await one_row(centre)
    assert (row["site"], row["archived"], row["phase"]) == (CHAIN.site, 20, "late"), done
    assert "1..4 is missing" in row["why"]
    why = {CHAIN: "E-MSG-TOO-LARGE: sequence 7 is too large; raise max_payload"}
    archive.documents.write_positions(TargetPositions(centre.target, 1.0, stopped=why))
    done, row = await one_row(centre)
    assert (done.code, row["phase"], row["why"]) == (3, "stopped", why[CHAIN])
    archive.documents.write_positions(TargetPositions(centre.target, 2.0, {CHAIN: 7}, stopped=why))
    _, row = await one_row(centre)
    assert row["phase"] != "stopped", "the target's state stands elsewhere by now"


async def test_a_chain_whose_archive_is_gone_is_lost(centre: Centre, archive: Archive, client: FloeClient) -> None:
    archive.put(rows_of(1, 20))
    async with centre.running():
        await centre.carried(client, 20)
        await soon(lambda: archive.documents.read_positions(centre.target) is not None)
    done = await floe("status", "-c", str(centre.write()), "--json")
    assert done.code == 0, done
    for info in [*archive.objects.list("")]:
        archive.objects.delete(info.key)
    done, row = await one_row(centre)
    assert (done.code, row["phase"], row["why"]) == (3, "lost", "its archive is gone from the bucket"), done


async def test_a_chain_that_begins_above_1_is_new_and_not_late(centre: Centre, archive: Archive) -> None:
    archive.documents.create_chain(CHAIN, ChainDocument((), 1, 101))
    archive.put(rows_of(101, 120))
    _, row = await one_row(centre)
    assert (row["phase"], row["archived"], row["lag_sequences"], row["alarm"]) == ("new", 120, 20, False), row


def test_watching_runs_until_it_is_interrupted(archive: Archive, centre: Centre) -> None:
    archive.put(rows_of(1, 5))
    words = ("status", "--watch", "1s", "-c", str(centre.write()), "--archive", "--json")
    with spawned(*words, stdout=subprocess.PIPE) as process:
        for _ in range(2):
            document = ""
            while not document.endswith("]\n"):
                document += (line := process.stdout.readline())
                assert line, f"it ended: {document}"
            assert [row["archived"] for row in json.loads(document)] == [5]
            process.send_signal(signal.SIGUSR1)  # only egress takes it; it ends no other command
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


# The status page of running services; `tests/acceptance/test_views_agree.py` compares it with the store


@pytest.mark.real
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (apt-get install chromium)")
async def test_a_browser_shows_holes_stops_and_coverage_by_level(
    client: FloeClient, tmp_path: Path, archive: Archive, nats_url: str
) -> None:
    other = Chain("eu-west", "NODES")
    archive.put(rows_of(1, 20))
    archive.put(rows_of(1, 20), level=1)
    archive.put(rows_of(31, 40))
    archive.put([message(1), message(2, b"x" * 5000)], chain=other)
    centre = Centre(tmp_path, archive, nats_url, create=None)
    config = {"subjects": [f"{centre.target}.>"], "allow_atomic": True, "max_msg_size": 4000}
    await create_stream(client, {"name": centre.target, **config})

    def hints(health: Health) -> list[str]:
        return [state["hint"] for state in centre.status(health).get("chains", {}).values() if "hint" in state]

    # A lease that is not lost while the browser takes the processors.
    async with centre.running(lease_ttl="10s") as health:
        await soon(lambda: len(hints(health)) == 2 and centre.status(health)["chains"][str(CHAIN)]["position"] == 21)
        health.record_reader()
        await soon(health.coverage)
        with served(health) as url:
            text = await asyncio.to_thread(dom, tmp_path, f"http://{url}/")
        rows = {row[0]: row for row in table_rows(text)}
        assert rows[str(CHAIN)][1:5] == ["late", "40", "20", "20"]
        assert (rows[str(CHAIN)][7], rows[str(other)][1]) == ("21..30", "stopped")
        assert bars(text) == {(0, 1, 20), (1, 1, 20), (0, 31, 40), (0, 1, 2)}
        assert bars(text, "hole") == {(0, 21, 30), (1, 21, 30)}
        assert all(hint in unescape(text) for hint in hints(health))


@pytest.mark.real
async def test_without_a_reader_the_store_is_not_asked_and_the_page_never_waits_for_it(bench: Bench) -> None:
    stream = await bench.filled([b"x"])
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.status(stream).get("end") == 1)
        await asyncio.sleep(1.5)
        assert running.health.coverage() == {}
        with served(running.health) as url:
            answer = await asyncio.to_thread(urlopen, f"http://{url}/", timeout=PATIENCE)
            body, headers = answer.read().decode(), answer.headers
        assert (headers["Cache-Control"], headers["Refresh"]) == ("no-store", "10")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "Not scanned yet" in body, "the first reader does not wait for the store"
        await soon(running.health.coverage)
