"""The demo's last question: can a stream be brought back from its segments? `floe drill` answers."""

from __future__ import annotations

import json

from common.errors import FloeError
from infra.demo_services import run_command
from infra.demo_world import AWKWARD, SITES, World

WHERE = (SITES[0], AWKWARD)  # the feed that holds every kind of message that is hard to carry


async def ask_drill(world: World) -> tuple[str, list[str]]:
    """Restore one feed into a scratch stream; a sentence about it, and what differs from the archive.

    Raises FloeError where the drill fails, or says nothing that can be read.
    """
    site, feed = WHERE
    command = ("floe", "drill", "-c", str(world.central_config), "--site", site, "--feed", feed, "--json")
    out = await run_command(world.folder, "drill", *command)
    try:
        found = json.loads(out)
        rows, seconds, is_well = found["rows"], found["seconds"], found["ok"]
    except (ValueError, KeyError, TypeError) as error:
        raise FloeError(f"floe drill --json: expected a report, found {out[:80]!r}", code="E-DEMO") from error
    problems = [] if is_well and rows else [f"drill of {site}/{feed}: {out[:500]}"]
    return f"{site}/{feed}: {rows:,} messages restored into a scratch stream in {seconds:.1f} s", problems
