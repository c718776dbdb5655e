"""The fault runs at full length: `python -m tests.soak [--only NAME]` writes docs/evidence/soak.json."""

import asyncio
import hashlib
import json
import platform
import random
import secrets
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from infra.local.s3 import SeaweedFS
from tests.scenarios.archives import archives
from tests.scenarios.delivery import delivered
from tests.scenarios.delivery_forgetful import work_queue
from tests.scenarios.many_chains import many_chains
from tests.scenarios.rounds import crash_rounds
from tests.scenarios.simulated import added, mutants, worlds
from tests.support.basics import SharedS3

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "soak.json"

EGRESS, INGRESS, COMPACTION = "egress", "ingress", "compaction"
BESIDE = (  # files that every run depends on
    *("bench", "common", "floe.py", "infra", "requirements.lock", "tests/scenarios", "tests/soak", "tests/support"),
)


@dataclass(frozen=True, slots=True)
class Soak:
    """One fault run at full length, and the parts of the product that it exercises."""

    run: Callable[[Any, random.Random], Awaitable[dict[str, Any]]]
    parts: tuple[str, ...]


WORLDS = {0: 2000, 40: 2000, 400: 100}  # seeds of the simulated world, by the chains of its target
CENTRE = (INGRESS, COMPACTION)
WHOLE = (EGRESS, *CENTRE)


def _option(name: str) -> Any:
    """Return the value of an option of the command."""
    return click.get_current_context().params[name]


async def _worlds(chains: int, *_: object) -> dict[str, Any]:
    return await worlds(_option("seeds") or range(1, WORLDS[chains] + 1), chains)


RUNS: dict[str, Soak] = {
    "crash_rounds": Soak(lambda _, rng: crash_rounds(rng), (*WHOLE, "tests")),
    "archives": Soak(lambda _, rng: archives(rng, rounds=600), (COMPACTION,)),
    "delivery_fast": Soak(lambda s3, rng: delivered(s3, rng, 1800, "fast"), CENTRE),
    "delivery_atomic": Soak(lambda s3, rng: delivered(s3, rng, 300, "atomic"), CENTRE),
    "delivery_single": Soak(lambda s3, rng: delivered(s3, rng, 300, "single"), CENTRE),
    "delivery_work_queue": Soak(lambda s3, rng: work_queue(s3, rng, 300, "auto"), CENTRE),
    "ten_thousand_chains": Soak(lambda _, rng: many_chains(rng, _option("chains"), _option("seconds")), CENTRE),
    **{
        f"worlds_{chains}" if chains else "worlds": Soak(partial(_worlds, chains), (*WHOLE, "tests/sim"))
        for chains in WORLDS
    },
    "mutants": Soak(lambda *_: mutants(), (*WHOLE, "tests/sim")),
}


def _names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[str]:
    names = (text or "").replace(",", " ").split()
    if unknown := sorted(set(names) - set(RUNS)):
        raise click.BadParameter(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    return names


def _range(_context: click.Context, _parameter: click.Parameter, text: str | None) -> range | None:
    if not text:
        return None
    first, _, last = text.rpartition("-")
    try:
        return range(int(first or 1), int(last) + 1)
    except ValueError as error:
        raise click.BadParameter(f"expected N or A-B, found {text}") from error


@click.command()
@click.option("--only", callback=_names, help="Names of runs, with commas or spaces between them.")
@click.option("--stale", is_flag=True, help="Only runs made before a change of what they exercise.")
@click.option("--seed", type=int, help="Repeat a run with the seed that it printed.")
@click.option("--seeds", callback=_range, help="Of the simulated worlds: N for 1-N, or A-B; what fits is added up.")
@click.option("--chains", default=10_000, help="Of ten_thousand_chains.")
@click.option("--seconds", default=3600.0, help="Of ten_thousand_chains.")
def main(only: list[str], stale: bool, seed: int | None, **_: object) -> None:
    """Run the fault runs at full length. Example: python -m tests.soak --only archives,mutants"""
    results = json.loads(EVIDENCE.read_text())["runs"] if EVIDENCE.exists() else {}
    names = [name for name in only or RUNS if not stale or _is_stale(name, results.get(name, {}))]
    failed = []
    with SeaweedFS() as server:
        for name in names:
            commit, code = _commit(name), _code(name)
            found = _run(server, name, seed if seed is not None else secrets.randbits(32))
            if not found["ok"]:
                failed.append(name)
            # Read again: another process of the soak may have written meanwhile.
            results = json.loads(EVIDENCE.read_text())["runs"] if EVIDENCE.exists() else {}
            found |= {"commit": commit, "code": code}
            _write(results | {name: added(results.get(name, {}), found)})
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _parts(name: str) -> tuple[str, ...]:
    return (*RUNS[name].parts, *BESIDE)


def _commit(name: str) -> str:
    """Return the commit of a run, with a note if files that count have uncommitted changes."""
    commit = _git("rev-parse", "--short=12", "HEAD").strip()
    return f"{commit} and changes" if _git("status", "--porcelain", "--", *_parts(name)).strip() else commit


def _code(name: str) -> str:
    """Return a digest of all committed files that count: the same in any history with the same files."""
    return hashlib.sha256(_git("ls-tree", "-r", "HEAD", "--", *_parts(name)).encode()).hexdigest()[:12]


def _is_stale(name: str, result: dict[str, Any]) -> bool:
    """True if the run failed, is missing, or was made with other files, or with uncommitted changes then or now."""
    unknown = not result.get("ok") or " " in result.get("commit", " ") or " " in _commit(name)
    return unknown or result.get("code") != _code(name)


def _run(server: SeaweedFS, name: str, seed: int) -> dict[str, Any]:
    click.echo(f"{name}, seed {seed} …")
    try:
        ran = asyncio.run(RUNS[name].run(SharedS3(server), random.Random(seed)))
    except AssertionError as error:
        click.echo(f"  {error}")
        return {"ok": False, "seed": seed, "why": str(error)[:2000]}
    result = {"ok": True, "seed": seed, **ran}
    click.echo(f"  {json.dumps(result)}")
    return result


def _write(results: dict[str, Any]) -> None:
    EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    document = {"python": platform.python_version(), "runs": results}
    EVIDENCE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


main()
