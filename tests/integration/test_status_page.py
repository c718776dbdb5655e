"""The status page of running services; `tests/acceptance/test_views_agree.py` compares it with the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from urllib.request import urlopen

import pytest

from common.chain import Chain
from common.jetstream.api import create_stream
from common.jetstream.client import FloeClient
from common.service.monitor import Health, Monitor
from tests.support.basics import soon, unique
from tests.support.browser import CHROMIUM, bars, dom, table_rows
from tests.support.egress import Bench
from tests.support.ingress import CHAIN, Archive, Centre, rows_of
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
        targets = [part for name, part in health.status()["parts"].items() if name.startswith("target ")]
        return [state["hint"] for part in targets for state in part.get("chains", {}).values() if "hint" in state]

    async with centre.running() as health:
        await soon(lambda: len(hints(health)) == 2)
        health.note_reader()
        await soon(health.coverage)
        with served(health) as url:
            text = await asyncio.to_thread(dom, tmp_path, url)
        rows = {row[0]: row for row in table_rows(text)}
        assert rows[str(CHAIN)][1:5] == ["late", "40", "21", "20"]
        assert (rows[str(CHAIN)][6], rows[str(other)][1]) == ("21..30", "stopped")
        assert bars(text) == {(0, 1, 20), (1, 1, 20), (0, 31, 40), (0, 1, 2)}
        assert bars(text, "hole") == {(0, 21, 30), (1, 21, 30)}
        assert all(hint in unescape(text) for hint in hints(health))


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
        assert (headers["Cache-Control"], headers["Refresh"]) == ("no-store", "10")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "Not looked at yet" in body, "the first reader does not wait for the store"
        await soon(running.health.coverage)
