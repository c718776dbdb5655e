"""Commands in hints: each is alone on its line, and the parser of `floe` accepts the whole line."""

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain as joined
from pathlib import Path
from typing import Any

import pytest

from common import exits
from common.archive import catalog, documents, scan, store
from common.archive.segment import Tip
from common.chain import Chain
from common.errors import FloeError, Stopped
from common.nats.api import StreamInfo
from common.sequences import SequenceRange
from common.settings.egress import FeedSettings
from common.settings.ingress import TargetSettings
from compaction.run import late_rows_remedies
from egress import identity, partition
from egress.decisions_cli import _lines
from egress.identity import Evidence, HeldMessage, SourceStream, SourceVerdict, VerdictKind, Witness
from egress.resolve import Case
from ingress import checkpoint, errors
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.prefetch import with_command
from ingress.chains.recall import Recall
from ingress.publishers.batches import choose_publisher
from ingress.recovery import survey, target
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.replay import ReplayTargetErrors, target_held_error
from ingress.recovery.request import ReplayHints, ReplayOptions, ReplayRequest
from ingress.recovery.source import hole_error
from ingress.rows import prepare
from ingress.verdict.verdict import Doubt, Finding, IntentVerdict, NoOrigin, Origin, TargetErrors, TargetReading
from tests.support.basics import commands_of, problems_of
from tests.support.reference import commands
from tests.support.tree import every_node, parsed

ROOT = Path(__file__).parents[2]
PRODUCT = ("common", "egress", "ingress", "compaction")
# A command within a line cannot be pasted; a text about a command names it without its options.
INSIDE = re.compile(r"\S.*\bfloe [a-z]+ .*-c ")

CHAIN, PLAIN = Chain("us-east", "IT'S", 3, 2), Chain("us-east", "NODES")
HOLE = SequenceRange(11, 20)
SETTINGS = TargetSettings.model_validate(
    {"stream": "FLEET", "sources": [{"site": "us-east", "feed": "NODES"}], "on_new_incarnation": "halt"}
)
REQUEST = ReplayRequest(
    *("us-east", "NODES", "A'TARGET", 1, 0, 3),
    to_time="2026-01-02T03:04:05Z",
    subjects=("a.*", "b.>"),
    into_source=True,
)
RESTORE = RestoreRequest("us-east", "IT'S", 3, "A NAME", to_time_ns=10**18, consumers=False, subjects=("a.>", "b.*"))
HINTS = ReplayHints(REQUEST, ReplayOptions(create=True, append=True, allow_lossy=True, skip_holes=True))
INFO = StreamInfo("BACK", "t0", {}, 1, 9, 9, "", "", "")


def part_of(**settings: Any) -> partition.Partition:
    return partition.partitions_of("us-east", FeedSettings(stream="NODES", **settings))[-1]


PARTS = [
    part_of(),
    part_of(name="a_name", on_recreated="halt"),
    part_of(partitions=("a.>", "b.>")),
    part_of(inspect_field="device", inspect_duration="1h"),
]


def verdicts() -> Iterator[str]:
    """Return the hints of all verdicts that stop, for feeds of all kinds."""
    source = SourceStream("2026", 81, 300, 1_000)
    for part in PARTS:
        for kind in identity.CODES:
            for held in HeldMessage:
                tips = (Witness(Tip(100, 1, "0" * 32), held),)
                found = None if kind is VerdictKind.GONE else source
                for end in (100, 400):
                    evidence = Evidence(found, "2025", end, tips)
                    yield identity.verdict_error(part, part.chain, evidence, SourceVerdict(kind, "why"), 90).hint


def test_the_acceptance_of_one_partition_names_it() -> None:
    [first, _] = partition.partitions_of("us-east", FeedSettings(stream="NODES", partitions=("a.>", "b.>")))
    evidence = Evidence(SourceStream("2026", 81, 300, 1_000), "2025", 100)
    lines = _lines(Case(first, evidence=evidence, verdict=SourceVerdict(VerdictKind.UNKNOWN, "why"), proposal=90))
    assert [line.split()[-2] for line in lines if line.endswith("--same")] == ["us-east/NODES/0000/0"]


def hint_of(call: Callable[[], object]) -> str:
    with pytest.raises(FloeError) as error:
        call()
    return error.value.hint


def of_targets() -> Iterator[str]:
    yield exits.checkpoint_command("A TARGET", "--forget")
    for choices in (TargetErrors("A TARGET"), ReplayTargetErrors(HINTS)):
        for finding in Finding:
            for last in (0, 7):
                for tail in (NoOrigin.GONE, Origin(CHAIN, 7)):
                    for doubt in (None, Doubt(3, 7, 9)):
                        seen = [TargetReading(last, "t0", tail)] * 3
                        yield choices.error(IntentVerdict(finding, detail="x", doubt=doubt), seen).hint
        for reading in (None, TargetReading(7, "t0", NoOrigin.GONE)):
            yield choices.no_checkpoint(reading).hint
    yield prepare.oversize_remedies("A TARGET")
    yield hint_of(lambda: checkpoint.from_json("A TARGET", b"[]"))
    yield hint_of(lambda: choose_publisher("A TARGET", "fast", {"fast": "the stream says allow_batched false"}))


def of_chains() -> Iterator[str]:
    registry = ChainRegistry(SETTINGS, prepare.TargetLimits(prepare.SubjectFilters([">"]), 1000))
    yield hint_of(lambda: registry.preparer(CHAIN))
    later = Chain("us-east", "NODES", 1)
    yield hint_of(lambda: registry.check_may_begin(later, 7))
    registry.set_previous_ends(later, {0: 7})
    yield hint_of(lambda: registry.check_may_begin(later, 7))
    for code in ("E-SUBJECT", "E-MSG-TOO-LARGE"):
        yield prepare.row_remedies(CHAIN, "A TARGET", code, 7)
        yield Recall(None, None, None, registry, None).refused_row_error(Stopped("x", code=code)).hint
    for hint in ("", "mend it"):
        yield with_command(FloeError("x", hint=hint), exits.resume_command("A TARGET", CHAIN)).hint
    yield from (exits.position_command("A TARGET", CHAIN, 5), exits.resume_command("A TARGET", PLAIN))
    yield exits.resume_command("A TARGET", None)
    yield errors.floor_remedy("A TARGET", CHAIN, 5)[1]


def of_replays() -> Iterator[str]:
    former = target.Receipt(REQUEST, (), 0, 0, True, 0.0)
    yield from (target.missing_error(HINTS).hint, target.not_empty_error(HINTS, INFO, None).hint, HINTS.source_hint(""))
    yield from (HINTS.source_hint("NODES"), HINTS.restart_hint(), HINTS.hole_hint(CHAIN, (HOLE, HOLE)))
    yield HINTS.command("--again")
    yield from (HINTS.refused_hint("E-SUBJECT"), HINTS.refused_hint("E-MSG-TOO-LARGE"))
    yield from (HINTS.not_created_hint(is_taken=True), HINTS.not_created_hint(is_taken=False))
    yield from (target.other_replay_error(HINTS, former).hint, target.unreadable_replay_error(HINTS, "x").hint)
    yield hole_error(HINTS, CHAIN, HOLE).hint
    yield hint_of(lambda: target.template(REQUEST, None))
    for key in (target.receipt_key("BACK"), "ingress.BACK"):
        yield target_held_error(HINTS, key, "somebody").hint
    yield survey.damaged_error(CHAIN, ["a"]).hint
    yield scan.vanishing_error(CHAIN).hint


# By the function that builds a command: texts with such commands.
SAMPLES: dict[str, Callable[[], Iterable[str]]] = {
    "common/archive/catalog.py:replay_command": lambda: [
        catalog.leftover_remedies(each, HOLE) for each in (CHAIN, PLAIN)
    ],
    "common/archive/documents.py:accept_command": lambda: [
        documents.hole_remedies(each, HOLE) for each in (CHAIN, PLAIN)
    ],
    "common/archive/store.py:quarantine_command": lambda: [store.quarantine_command("a b.parquet")],
    "compaction/run.py:late_rows_remedies": lambda: [late_rows_remedies(each, HOLE) for each in (CHAIN, PLAIN)],
    "common/exits.py:resolve_command": lambda: [
        exits.resolve_command("IT'S", "--new-incarnation --from 3"),
        exits.believe_command(CHAIN),
        exits.resolve_command("-dash", "--believe-listing"),
    ],
    "common/exits.py:repartition_command": lambda: [
        exits.repartition_command("IT'S"),
        exits.repartition_command("-dash"),
    ],
    "common/exits.py:restore_command": lambda: [
        exits.restore_command(chain, elsewhere=reaches) for chain in (CHAIN, PLAIN) for reaches in (True, False)
    ],
    "common/exits.py:import_command": lambda: [exits.import_command("a b", each) for each in (CHAIN, PLAIN)],
    "common/exits.py:list_command": verdicts,
    "common/exits.py:verify_command": lambda: [exits.verify_command(str(CHAIN)), exits.verify_command("us-east/IT'S")],
    "common/exits.py:parked_command": lambda: [exits.parked_command("A TARGET")],
    "common/exits.py:checkpoint_command": of_targets,
    "common/exits.py:resume_command": of_chains,
    "ingress/recovery/request.py:ReplayHints.command": of_replays,
    "ingress/recovery/history.py:repeat_command": lambda: [
        repeat_command(RESTORE, "--force"),
        repeat_command(replace(RESTORE, skip_to=0, to_time_ns=None)),
        repeat_command(replace(RESTORE, promote=False, subjects=())),
    ],
}
# Built in code that needs servers; the text after `floe_command(` is a literal, or other tests check it.
ELSEWHERE = {
    *("egress/flush.py", "egress/report.py", "ingress/delivery.py", "ingress/service.py"),
    *("ingress/operator/decisions_cli.py", "ingress/recovery/drill.py"),
}


PYTHON = [*joined.from_iterable((ROOT / each).rglob("*.py") for each in PRODUCT)]
PRINTING = [path for path in PYTHON if "floe_command(" in path.read_text()]


def builders() -> set[str]:
    """Return the functions of the product that call `exits.floe_command`."""
    found = set()
    for path in PRINTING:
        name = str(path.relative_to(ROOT))
        found |= {f"{name}:{function}" for function in _calling(parsed(path), "")}
    return found


def _calling(node: ast.AST, within: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calling(child, f"{within}.{child.name}".strip("."))
        else:
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") == "floe_command":
                yield within
            yield from _calling(child, within)


def test_each_function_that_builds_a_command_is_tried_here() -> None:
    assert {each for each in builders() if each.split(":")[0] not in ELSEWHERE} == set(SAMPLES)


def test_the_words_of_each_printed_command_name_a_command() -> None:
    calls = []
    for path in PRINTING:
        nodes = [n for n in every_node(parsed(path)) if isinstance(n, ast.Call)]
        calls += [n.args[0] for n in nodes if getattr(n.func, "id", "") == "floe_command"]
    words = [each.value.split() for each in calls if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    assert len(words) == len(calls) > 20
    assert [each for each in words if tuple(each) not in {*commands()}] == []


def test_names_in_commands_of_nats_are_quoted() -> None:
    line = exits.nats_command("consumer rm", "$MQTT_msgs", "a'b")
    assert shlex.split(line) == ["nats", "consumer", "rm", "$MQTT_msgs", "a'b"] != line.split()
    unquoted = re.compile(r"nats (?:stream|consumer) \w+ \{")
    assert [path for path in PYTHON if unquoted.search(path.read_text())] == []


def problems(hint: str) -> list[str]:
    """Return a line for each command that cannot be pasted."""
    found = problems_of(hint)
    for line in hint.split("\n"):
        if INSIDE.search(line):
            found.append(f"{line}: a command that does not stand alone")
        elif not line.startswith("floe ") and (" | " in line or " && " in line):
            found.append(f"{line}: two commands in one line")
    return found


@pytest.mark.parametrize("builder", SAMPLES)
def test_each_command_is_alone_on_its_line_and_is_valid(builder: str) -> None:
    texts = [*SAMPLES[builder]()]
    assert any(map(commands_of, texts))
    assert [problem for text in texts for problem in problems(text)] == []


@pytest.mark.parametrize(("before", "after"), [("", "BACK_ALL"), ("BACK_ALL", "BACK_ALL_2")])
def test_a_prefix_of_its_own_is_proposed_where_another_stream_has_the_subjects(before: str, after: str) -> None:
    """Propose a prefix: the server would refuse `nats stream add` with these subjects as well."""
    request = ReplayRequest("s", "F", "BACK", prefix=before)
    hint = ReplayHints(request, ReplayOptions(create=True)).not_created_hint(is_taken=True)

    assert "nats stream add" not in hint
    assert f"--subject-prefix {after} --create" in hint
