"""The pictures of the status page for the docs: `python -m tests.support.screenshots docs/images`."""

import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from common.chain import Chain
from common.nats.api import create_stream
from common.observe.monitor import Health, Monitor
from infra.local.nats import NatsServer
from tests.support.basics import soon
from tests.support.browser import screenshot
from tests.support.egress import Bench, connected
from tests.support.ingress import Archive, Centre, rows_of
from tests.support.segments import message


async def main(images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with NatsServer() as server:
            await egress(folder / "site", server.url, images / "status-egress.png")
            await ingress(folder / "centre", server.url, images / "status-ingress.png")


async def egress(folder: Path, url: str, path: Path) -> None:
    """Take a picture of a site with three feeds, of which one has stopped."""
    folder.mkdir()
    client = await connected(url)
    bench = Bench(url, folder, client, "L1", "S1")
    streams = [await bench.make_stream(name) for name in ("NODES", "ALERTS", "JOBS")]
    for stream in streams:
        await bench.publish(stream, [b"x" * 100] * 3000)
    async with bench.egress(*({"stream": stream} for stream in streams)) as running:
        await soon(lambda: all(running.status(stream).get("end") == 3000 for stream in streams))
        await bench.delete_stream("JOBS")
        await soon(lambda: running.state("JOBS") == "stopped")
        await picture(running.health, folder, path, "1000,1010")
    await client.aclose()


async def ingress(folder: Path, url: str, path: Path) -> None:
    """Take a picture of a centre with chains of two sites: one waits for a hole, one has stopped."""
    folder.mkdir()
    rng = random.Random(7)
    archive = Archive(folder / "store")
    east, west = (Chain(site, "NODES") for site in ("us-east", "us-west"))
    begin = 1
    while begin < 6000:
        end = begin + rng.randint(100, 400)
        if begin > 1500 and not 4000 < begin < 4400:
            archive.put(rows_of(begin, end, east), chain=east)
        begin = end + 1
    archive.put(rows_of(1, 1700, east), chain=east, level=2)
    archive.put(rows_of(1701, 3000, east), chain=east, level=1)
    archive.put([*rows_of(1, 40, west), message(41, b"x" * 5000)], chain=west)
    for info in archive.objects.list(""):
        at = time.time() - 3000
        os.utime(archive.folder / info.key, (at, at))
    sources = [{"site": [each.site for each in (east, west)], "feed": ["NODES"], "subject_prefix": "FLEET"}]
    centre = Centre(folder, archive, url, create=None, stream="FLEET", sources=sources)
    client = await connected(url)
    await create_stream(client, {"name": "FLEET", "subjects": ["FLEET.>"], "allow_atomic": True, "max_msg_size": 4000})
    async with centre.running() as health:
        await soon(lambda: "stopped" in str(health.status()["parts"]) and "'hole'" in str(health.status()["parts"]))
        await picture(health, folder, path, "1000,1180")
    await client.aclose()


async def picture(health: Health, folder: Path, path: Path, size: str) -> None:
    health.record_reader()
    await soon(health.coverage)
    monitor = Monitor("127.0.0.1:0", health)
    monitor.start()
    try:
        await asyncio.to_thread(screenshot, folder, f"http://127.0.0.1:{monitor.port}/", path, size)
    finally:
        monitor.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
