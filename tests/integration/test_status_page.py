"""The status page of running services, as a browser shows it, beside what the store and the streams hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from common.chain import Chain
from common.jetstream.api import create_stream
from common.jetstream.client import FloeClient
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from common.service.monitor import Health, Monitor
from tests.support.basics import soon, unique
from tests.support.browser import bars, dom, needs_chromium, table_rows
from tests.support.egress import Bench
from tests.support.ingress import CHAIN, Archive, Centre, count_in, rows_of
from tests.support.segments import message

pytestmark = pytest.mark.servers


@contextmanager
def served(health: Health) -> Iterator[str]:
    """The address at which the pages of `health` are served."""
    monitor = Monitor("127.0.0.1:0", health)
    monitor.start()
    try:
        yield f"http://127.0.0.1:{monitor.port}/"
    finally:
        monitor.close()


async def seen(folder: Path, url: str, health: Health) -> str:
    """The page as a browser shows it, once coverage was looked at: which begins with the first reader."""
    if not health.coverage():
        health.note_reader()
        await soon(health.coverage)
    return await asyncio.to_thread(dom, folder, url)


def stored(store: SegmentStore, chain: Chain) -> set[tuple[int, int, int]]:
    """Level and ends of all that is covered in one piece, as the bucket lists it."""
    found: set[tuple[int, int, int]] = set()
    for level in range(10):
        pieces: list[SequenceRange] = []
        for rows in sorted(ref.coverage for ref in store.list(chain, level=level)):
            if pieces and rows.first <= pieces[-1].last + 1:
                pieces[-1] = SequenceRange(pieces[-1].first, max(pieces[-1].last, rows.last))
            else:
                pieces.append(rows)
        found |= {(level, each.first, each.last) for each in pieces}
    return found


@needs_chromium
async def test_the_page_of_ingress_shows_holes_stops_and_coverage_by_level(
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
    async with centre.running() as health:
        await soon(lambda: count(health, "stopped") == 1 and count(health, "hole") == 1)
        with served(health) as url:
            text = await seen(tmp_path, url, health)
        rows = {row[0]: row for row in table_rows(text)}

        assert rows[str(CHAIN)][1:5] == ["late", "40", "21", "20"]
        assert rows[str(CHAIN)][6] == "21..30"
        assert rows[str(other)][1] == "stopped"
        assert await count_in(client, centre.target) == 21
        assert bars(text) == stored(archive.store, CHAIN) | stored(archive.store, other)
        assert bars(text, "hole") == {(0, 21, 30), (1, 21, 30)}
        hints = [state["hint"] for state in chains(health).values() if "hint" in state]
        assert len(hints) == 2
        for hint in hints:
            assert hint.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def chains(health: Health) -> dict[str, dict[str, object]]:
    targets = [part for name, part in health.status()["parts"].items() if name.startswith("target ")]
    return {chain: state for target in targets for chain, state in target.get("chains", {}).items()}


def count(health: Health, key: str) -> int:
    return sum(key in state for state in chains(health).values())


async def test_without_a_reader_the_store_is_not_asked_and_the_page_never_waits_for_it(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"])
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.status(stream).get("end") == 1)
        await asyncio.sleep(1.5)
        assert running.health.coverage() == {}
        with served(running.health) as url:
            answer = await asyncio.to_thread(urlopen, url, timeout=10)
            body, headers = answer.read().decode(), answer.headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["Refresh"] == "10"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "Not looked at yet" in body, "the first reader does not wait for the store"
        await soon(running.health.coverage)
