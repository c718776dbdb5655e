"""The commands of the runbook (docs/guides/replay.md) as printed there, against a world that lost something."""

import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from common.archive.segment import Message
from common.chain import Chain
from common.nats.api import stream_info
from common.nats.client import FloeClient
from tests.support.basics import soon, unique
from tests.support.commands import ROOT, Done, configuration, floe
from tests.support.egress import SITE, Bench
from tests.support.ingress import Archive, Centre, check_exact, closed_at, count_in, rows_of, stop_of

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("checking_often")]
ASK = ("checkpoint", "set")  # commands that ask on a terminal: here is none


def commands(section: str) -> list[str]:
    """The lines of the code blocks of a section, in order."""
    page = (ROOT / "docs" / "guides" / "replay.md").read_text()
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert text, section
    blocks = re.findall(r"^( *)```sh\n(.*?)^ *```$", text[1], re.M | re.S)
    return [line.strip() for _, block in blocks for line in block.splitlines()]


@dataclass(frozen=True)
class Page:
    """A section, and the replacements of the names in it."""

    section: str
    names: dict[str, str]

    async def run(self, wanted: str) -> Done:
        """Run the one command that ends in `wanted`; only names are replaced."""
        (line,) = [each for each in commands(self.section) if each.endswith(wanted)]
        program, *words = [
            "/".join(self.names.get(part, part) for part in word.split("/")) for word in shlex.split(line)
        ]
        assert program == "floe"
        yes = ["--yes"] if tuple(words[:2]) == ASK and "--dry-run" not in words else []
        done = await floe(*words, *yes)
        assert done.code == 0, (line, done)
        return done


def recent(first: int, last: int) -> list[Message]:
    """Rows of the last minutes."""
    begin = int((time.time() - 600) * 1e9)
    return [replace(m, timestamp_ns=begin + m.sequence * 1_000_000) for m in rows_of(first, last)]


def page_of(section: str, centre: Centre) -> Page:
    last = f"{centre.target}_LAST"
    names = {"central.yaml": str(centre.write()), "FLEET": centre.target, "FLEET_LAST": last, "last": last}
    return Page(section, names)


async def test_the_target_of_the_centre_is_lost(client: FloeClient, tmp_path: Path, nats_url: str) -> None:
    archive = Archive(tmp_path / "store")
    archive.put(recent(1, 30))
    centre = Centre(tmp_path, archive, nats_url)
    page = page_of("The centre's target is lost", centre)
    async with centre.running() as health:
        await closed_at(client, centre, 30)
        await page.run("--subject-prefix last --create")  # beside the living target
        assert await count_in(client, f"{centre.target}_LAST") == 30

        await client.api(f"STREAM.DELETE.{centre.target}")
        archive.put(recent(31, 40))
        assert (await stop_of(centre, health))["code"] == "E-TARGET-GONE"
        await page.run("--forget")
        check_exact(await centre.carried(client, 40), archive, centre.prefix)


async def test_the_stream_at_a_site_is_lost_and_the_centre_gets_nothing_twice(bench: Bench) -> None:
    name = unique("NODES")
    feed: dict[str, Any] = {"stream": name}
    centre = over(bench, name)
    files = {"site.yaml": str(configuration(bench, feed)), "central.yaml": str(centre.write())}
    names = {"us-east": SITE, "NODES": name, "FLEET": centre.target}
    page = Page("A stream that cannot come back as it was", files | names)
    await bench.make_stream(name)
    await bench.publish(name, (b"%d" % n for n in range(300)))
    running = bench.start(bench.settings(feed))
    try:
        async with centre.running() as health:
            await centre.carried(bench.client, 300)
            await bench.client.api(f"STREAM.DELETE.{name}")
            done = await page.run("--into-source --create")
            count = int(re.findall(r"done: (\d+) messages", done.out)[0])

            def halted() -> bool:
                stop = centre.status(health).get("chains", {}).get(str(Chain(SITE, name, 1)), {})
                return stop.get("code") == "E-INCARNATION" and bench.end(name, 1) == count

            await soon(halted)
            page.names["N+1"] = str(count + 1)
            await page.run("--sequence N+1")
            await bench.publish(name, (b"new %d" % n for n in range(5)))
            messages = await centre.carried(bench.client, 305)
    finally:
        await running.drain()
    assert (count, [m.message.payload for m in messages[300:]]) == (300, [b"new %d" % n for n in range(5)])
    former, again = ([(m.sequence, m.subject, m.payload) for m in bench.messages(name, k)] for k in (0, 1))
    assert again[:300] == former, "archived again as it was"
    assert (await stream_info(bench.client, centre.target)).messages == 305


def over(bench: Bench, feed: str) -> Centre:
    """A centre over the bucket of the bench, that halts at new incarnations."""
    target = unique("FLEET")
    sources = [{"site": [SITE], "feed": [feed], "subject_prefix": target}]
    archive = Archive(bench.root / "bucket")
    return Centre(bench.root, archive, str(bench.url), stream=target, sources=sources, on_new_incarnation="halt")
