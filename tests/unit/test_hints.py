"""Every command of every hint is taken by the parser of `floe` as it stands, to the end of its line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import chain as joined
from pathlib import Path
from typing import Any, cast

import pytest

from common import exits
from common.chain import Chain
from common.segments import archive, documents, store
from common.segments.segment import Tip
from common.sequences import SequenceRange
from common.settings.egress import FeedSettings
from egress import identity, partition
from egress.identity import Evidence, HeldMessage, SourceStream, SourceVerdict, VerdictKind, Witness
from egress.partition import Partition, partitions_of
from ingress import errors as chain_advice
from ingress.replay import request as replay_advice
from ingress.replay.request import ReplayOptions, Request
from tests.support.basics import commands_of, problems_of

ROOT = Path(__file__).parents[2]
PRODUCT = ("common", "egress", "ingress", "compaction")

CHAIN, PLAIN = Chain("us-east", "IT'S", 3, 2), Chain("us-east", "NODES")
HOLE = SequenceRange(11, 20)
REQUEST = Request(
    "us-east",
    "NODES",
    "A TARGET",
    incarnation=1,
    partition=0,
    from_sequence=3,
    to_time="2026-01-02T03:04:05Z",
    subjects=("a.*", "b.>"),
    prefix="x",
    into_source=True,
)


def part_of(**settings: Any) -> Partition:
    return partitions_of("us-east", FeedSettings(stream="NODES", **settings))[-1]


PARTS = [
    part_of(),
    part_of(name="a_name", on_recreated="halt"),
    part_of(partitions=("a.>", "b.>")),
    part_of(inspect_field="device", inspect_duration="1h"),
]


def verdicts() -> Iterator[str]:
    """The hints of all verdicts that stop, for feeds of all kinds."""
    source = SourceStream("2026", 81, 300, 1_000)
    for part in PARTS:
        for kind in identity.CODES:
            for held in HeldMessage:
                tips = (Witness(Tip(100, 1, "0" * 32), held),)
                found = None if kind is VerdictKind.GONE else source
                for end in (100, 400):
                    evidence = Evidence(found, "2025", end, tips)
                    yield identity.stopped_error(part, part.chain, evidence, SourceVerdict(kind, "why"), 90).hint


# By the function that builds a command: texts in which such commands stand.
SAMPLES: dict[str, Callable[[], object]] = {
    "common/segments/archive.py:carry": lambda: [archive.ways_on(each, HOLE) for each in (CHAIN, PLAIN)],
    "common/segments/documents.py:accept_command": lambda: [documents.way_out(each, HOLE) for each in (CHAIN, PLAIN)],
    "common/segments/documents.py:carry_late": lambda: [documents.carry_late(each, HOLE) for each in (CHAIN, PLAIN)],
    "common/segments/store.py:quarantine_command": lambda: store.quarantine_command("a b.parquet"),
    "egress/identity.py:_hint": verdicts,
    "egress/partition.py:resolve": lambda: [
        partition.resolve("IT'S", "--new-incarnation --from 3", 0),
        partition.believe_listing(CHAIN),
    ],
    "egress/partition.py:repartition": lambda: partition.repartition("IT'S"),
    "egress/partition.py:bring_back": lambda: [
        partition.bring_back(chain, reaches=reaches) for chain in (CHAIN, PLAIN) for reaches in (True, False)
    ],
    "ingress/errors.py:set_command": lambda: [
        chain_advice.set_command("A TARGET", "--forget"),
        chain_advice.set_position("A TARGET", CHAIN, 5),
    ],
    "ingress/errors.py:resume": lambda: [
        chain_advice.resume("A TARGET", CHAIN),
        chain_advice.resume("A TARGET", PLAIN),
    ],
    "ingress/replay/request.py:Advice.same": lambda: replay_advice.Advice(
        REQUEST, ReplayOptions(create=True, append=True, allow_lossy=True, skip_holes=True)
    ).same("--again"),
}
# Made in the middle of what needs servers; the text after `command(` is a literal, or held by other tests.
ELSEWHERE = {
    *("egress/flush.py", "egress/report.py", "ingress/delivery.py", "ingress/chains/pauses.py"),
    *("ingress/operator/parked_cli.py", "ingress/replay/drill.py", "ingress/replay/survey.py"),
    "ingress/restore/history.py",
}


def builders() -> set[str]:
    """The functions of the product that call `exits.command`."""
    found = set()
    for path in joined.from_iterable((ROOT / each).rglob("*.py") for each in PRODUCT):
        tree = ast.parse(path.read_text())
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        if any(n.module == exits.__name__ and "command" in [a.name for a in n.names] for n in imports):
            name = str(path.relative_to(ROOT))
            found |= {f"{name}:{function}" for function in _calling(tree, "")}
    return found


def _calling(node: ast.AST, within: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calling(child, f"{within}.{child.name}".strip("."))
        else:
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") == "command":
                yield within
            yield from _calling(child, within)


def test_each_function_that_builds_a_command_is_tried_here() -> None:
    untried = {each for each in builders() if each.split(":")[0] not in ELSEWHERE}
    assert untried == set(SAMPLES)


@pytest.mark.parametrize("builder", SAMPLES)
def test_each_command_is_taken_as_it_stands(builder: str) -> None:
    made = SAMPLES[builder]()
    texts = [made] if isinstance(made, str) else list(cast("Iterator[str]", made))
    assert any(map(commands_of, texts))
    assert [problem for text in texts for problem in problems_of(text)] == []
