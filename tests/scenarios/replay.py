"""Replays that are killed at random points and started again: the target must be the range, once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common.chain import Chain
from common.jetstream.api import create_stream
from common.open import load_settings, open_chains, open_store
from common.segments.documents import ChainDocument, StreamDocument
from common.segments.segment import Message
from common.segments.store import SegmentStore
from infra.oracle import Trace, compare, prefixed, target_traces
from tests.scenarios.load import HEADERS, client_of
from tests.scenarios.processes import Service
from tests.scenarios.world import World
from tests.support.segments import message, write_segment

CHAINS = (Chain("alpha", "NODES", 0, 0), Chain("alpha", "NODES", 0, 1))
FAILPOINTS = (
    "replay.begun",
    "ingress.after_intent",
    "ingress.mid_batch",
    "ingress.after_commit",
    "ingress.before_close",
    "ingress.after_close",
)
UNFINISHED = 75


async def replay_kills(s3: Any, rng: random.Random, rounds: int = 30, rows: int = 6000) -> dict[str, Any]:
    """Replay a part of two partitions, killed `rounds` times on the way, over as many targets as that takes.

    Raises AssertionError where a target is not exactly the range. What was done, for the evidence.
    """
    started, faults, targets = time.monotonic(), Counter[str](), 0
    with World(s3) as world:
        config = _config(world)
        settings = load_settings(str(config))
        expected = _archive(open_store(settings), open_chains(settings), rng, rows)
        while sum(faults.values()) < rounds:
            targets += 1
            name = f"BACK{targets}"
            async with client_of(world.central.url) as client:
                await create_stream(
                    client, {"name": name, "subjects": [f"{name}.>"], "allow_atomic": True, "allow_batched": True}
                )
            await _replayed(world, config, name, rng, faults, rounds)
            async with client_of(world.central.url) as client:
                await _check(client, name, expected)
    return {
        "seconds": round(time.monotonic() - started, 1),
        "kills": sum(faults.values()),
        "faults": dict(faults),
        "targets": targets,
        "messages": targets * sum(map(len, expected.values())),
    }


def _config(world: World) -> Path:
    return world.write(
        "replay",
        {
            "nats": {"url": world.central.url},
            "store": world.store(),
            "ingress": {"lease_ttl": "1s", "memory_limit": "16M"},
        },
    )


def _archive(store: SegmentStore, documents: Any, rng: random.Random, rows: int) -> dict[Chain, list[Message]]:
    """Segments of both partitions, some of them compacted; what of them a replay of the middle must give."""
    wanted: dict[Chain, list[Message]] = {}
    for chain in CHAINS:
        documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0"))
        documents.create_chain(chain, ChainDocument((), 2, 1))
        made = [_row(sequence, rng) for sequence in range(1, rows + 1)]
        step = rows // 12
        for first in range(0, rows, step):
            _put(store, chain, made[first : first + step], 0)
        _put(store, chain, made[3 * step : 6 * step], 1)
        wanted[chain] = [m for m in made if rows // 10 <= m.sequence <= rows - rows // 10]
    return wanted


def _row(sequence: int, rng: random.Random) -> Message:
    block = rng.choice(HEADERS)
    headers = block % sequence if block and b"%d" in block else block
    return message(sequence, rng.randbytes(rng.randrange(600)), headers=headers)


def _put(store: SegmentStore, chain: Chain, rows: list[Message], level: int) -> None:
    path = store.new_spool()
    store.put(write_segment(path, rows, chain=chain, level=level))
    path.unlink()


async def _replayed(
    world: World, config: Path, name: str, rng: random.Random, faults: Counter[str], rounds: int
) -> None:
    """Start the same command again and again until it says that all is done."""
    while True:
        victim = _started(world, config, name, rng, spared=sum(faults.values()) >= rounds)
        killed = f"SIGKILL after {victim.name}"
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(1.0, 3.0))
            killed = "SIGKILL at a moment"
            if sum(faults.values()) < rounds:
                await asyncio.to_thread(victim.kill)
        code = await asyncio.to_thread(victim.wait, 90)
        if code == 0:
            return
        assert code == -9, victim.tail()
        faults[killed] += 1


def _started(world: World, config: Path, name: str, rng: random.Random, *, spared: bool) -> Service:
    command = ["replay", "-c", str(config), "--site", "alpha", "--feed", "NODES", "--target", name]
    command += ["--subject-prefix", name, "--from-sequence", "600", "--to-sequence", "5400"]
    point = rng.choice(FAILPOINTS)
    env = {} if spared else {"FLOE_FAILPOINTS": f"{point}=kill@{rng.randint(1, 3)}"}
    if not spared and rng.random() < 0.5:
        command += ["--rate", f"{rng.choice([3000, 10_000])}/s"]
    service = Service(world.folder, point, *command, env=env).start()
    world.services.append(service)
    return service


async def _check(client: Any, name: str, expected: dict[Chain, list[Message]]) -> None:
    found = await target_traces(client, name)
    assert found.foreign == 0
    assert set(found.traces) == set(expected)
    for chain, rows in expected.items():
        result = compare(Trace.of(rows, prefixed(name)), found.traces[chain], name=str(chain))
        assert result.ok, result.report()
