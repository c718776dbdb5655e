"""`python -m tests.soak [--only NAME]`: run the fault runs at full length, write docs/evidence/soak.json."""

from __future__ import annotations

import asyncio
import json
import platform
import random
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from infra.local.seaweedfs import SeaweedFS
from tests.scenarios import sampling
from tests.scenarios.bucket import compacted, shuffled
from tests.scenarios.delivery import delivered
from tests.scenarios.delivery_forgetful import per_subject, work_queue
from tests.scenarios.faults import Outcome, kill_rounds, standby, twins
from tests.scenarios.foreign_site import foreign_site
from tests.scenarios.histories import recreated_unput, recreated_while_down, recreated_while_running
from tests.scenarios.many_sites import many_sites
from tests.scenarios.replay import replay_kills
from tests.scenarios.retention import retention
from tests.scenarios.sharing import shared
from tests.scenarios.sharing_sampled import sampled_shared
from tests.scenarios.takeover import take_overs
from tests.support import SharedS3

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "soak.json"

Ran = Outcome | dict[str, Any]  # what says itself whether it is well, or what has raised nothing

RUNS: dict[str, Callable[[Any, random.Random], Awaitable[Ran]]] = {
    "kill_rounds": lambda s3, rng: kill_rounds(s3, rng, rounds=50, rate=1000),
    "twins": lambda s3, rng: twins(s3, rng, seconds=60, rate=1000),
    "standby": lambda s3, rng: standby(s3, rng, seconds=60, rate=500),
    "recreated_while_down": recreated_while_down,
    "recreated_while_running": recreated_while_running,
    "recreated_unput": recreated_unput,
    "compacted": lambda s3, rng: compacted(s3, rng, seconds=60, rate=1000),
    "compacted_spark": lambda s3, rng: compacted(s3, rng, seconds=60, rate=1000, engine="spark"),
    "shuffled": lambda s3, rng: shuffled(s3, rng, seconds=45, rate=1000),
    "sampled_crashes": lambda _, rng: sampling.run(100, rng.getrandbits(32)),
    "sharing": lambda s3, rng: shared(s3, rng, seconds=60),
    "sharing_sampled": lambda s3, rng: sampled_shared(s3, rng, seconds=60),
    "retention": lambda s3, rng: retention(s3, rng, seconds=60),
    "delivery_fast": lambda s3, rng: delivered(s3, rng, 300, "fast"),
    "delivery_atomic": lambda s3, rng: delivered(s3, rng, 300, "atomic"),
    "delivery_single": lambda s3, rng: delivered(s3, rng, 300, "single"),
    "delivery_work_queue": lambda s3, rng: work_queue(s3, rng, 300, "auto"),
    "delivery_per_subject": lambda s3, rng: per_subject(s3, rng, 300, "auto"),
    "replay_kills": lambda s3, rng: replay_kills(s3, rng, rounds=30),
    "take_overs": lambda s3, rng: take_overs(s3, rng, rounds=10),
    "foreign_site": lambda s3, rng: foreign_site(s3, rng, seconds=60),
    "many_sites": lambda s3, rng: many_sites(s3, rng, segments=94_000, seconds=300),
}


@click.command()
@click.option("--only", type=click.Choice(sorted(RUNS)), help="Run this one alone.")
@click.option("--seed", type=int, help="Repeat a run with the seed that it printed.")
def main(only: str | None, seed: int | None) -> None:
    """Run the fault runs at full length. Example: python -m tests.soak --only kill_rounds"""
    results = json.loads(EVIDENCE.read_text())["runs"] if EVIDENCE.exists() else {}
    failed = []
    with SeaweedFS() as server:
        for name in [only] if only else list(RUNS):
            results[name] = _run(server, name, seed if seed is not None else secrets.randbits(32))
            if not results[name]["ok"]:
                failed.append(name)
            _write(results)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(server: SeaweedFS, name: str, seed: int) -> dict[str, Any]:
    click.echo(f"{name}, seed {seed} …")
    try:
        ran = asyncio.run(RUNS[name](SharedS3(server), random.Random(seed)))
    except AssertionError as error:
        click.echo(f"  {error}")
        return {"ok": False, "seed": seed, "why": str(error)[:2000]}
    ok, found = (ran.verdict.ok, ran.as_json()) if isinstance(ran, Outcome) else (True, ran)
    result = {"ok": ok, "seed": seed, **found}
    click.echo(f"  {json.dumps(result)}")
    if isinstance(ran, Outcome) and not ok:
        click.echo(ran.verdict.report())
    return result


def _write(results: dict[str, Any]) -> None:
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    document = {"python": platform.python_version(), "runs": results}
    EVIDENCE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


main()
