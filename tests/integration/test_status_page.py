"""The status page of a running service; `tests/acceptance/test_views_agree.py` compares it with the store."""

from __future__ import annotations

import asyncio
from urllib.request import urlopen

import pytest

from common.service.monitor import Monitor
from tests.support.basics import soon, unique
from tests.support.egress import Bench

pytestmark = pytest.mark.servers


async def test_without_a_reader_the_store_is_not_asked_and_the_page_never_waits_for_it(bench: Bench) -> None:
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, [b"x"])
    async with bench.egress({"stream": stream}) as running:
        await soon(lambda: running.status(stream).get("end") == 1)
        await asyncio.sleep(1.5)
        assert running.health.coverage() == {}
        monitor = Monitor("127.0.0.1:0", running.health)
        monitor.start()
        try:
            answer = await asyncio.to_thread(urlopen, f"http://127.0.0.1:{monitor.port}/", timeout=10)
            body, headers = answer.read().decode(), answer.headers
        finally:
            monitor.close()
        assert (headers["Cache-Control"], headers["Refresh"]) == ("no-store", "10")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "Not looked at yet" in body, "the first reader does not wait for the store"
        await soon(running.health.coverage)
