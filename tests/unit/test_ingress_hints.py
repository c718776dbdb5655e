"""Every hint of ingress and replay: one command a line, nothing behind it, and `floe` takes each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.chain import Chain
from common.errors import FloeError, Stopped
from common.jetstream.api import StreamInfo
from common.segments import documents
from common.sequences import SequenceRange
from common.settings.ingress import TargetSettings
from ingress import checkpoint_store as state_module
from ingress import errors as advice
from ingress.chains.chain_state import ChainRegistry
from ingress.chains.prefetch import with_way_out
from ingress.chains.recall import Recall
from ingress.checkpoint_store import from_json
from ingress.publishers.choose import choose
from ingress.replay import survey, target
from ingress.replay.receipt import Receipt, other, receipt_key, unreadable
from ingress.replay.replay import ReplayChoices, held_error
from ingress.replay.request import Advice, ReplayOptions, Request
from ingress.replay.source import hole_error
from ingress.rows.prepare import Accepting, TargetLimits, oversize_hint, way_out
from ingress.verdict.verdict import Doubt, Finding, IntentVerdict, Origin, TargetErrors, TargetReading, Unread
from tests.support.basics import problems_of

# In the middle of a line nobody can paste it; words about a command name it without its options.
INSIDE = re.compile(r"\S.*\bfloe [a-z]+ .*-c ")

CHAIN = Chain("us-east", "NODES'DATA", 3, 2)
HOLE = SequenceRange(5, 9)
SETTINGS = TargetSettings.model_validate(
    {"stream": "FLEET", "sources": [{"site": "us-east", "feed": "NODES"}], "on_new_incarnation": "halt"}
)
REQUEST = Request(site="us-east", feed="NODES'DATA", target="BACK", prefix="back", from_sequence=3)
ADVICE = Advice(REQUEST, ReplayOptions(create=True, append=True))
INFO = StreamInfo("BACK", "t0", {}, 1, 9, 9, "", "", "")


def problems(hint: str) -> list[str]:
    """A line for each command that cannot be pasted; empty where all can."""
    found = []
    for line in hint.split("\n"):
        if line.startswith("floe "):
            found += problems_of(line)
        elif INSIDE.search(line):
            found.append(f"{line}: a command that does not stand alone")
        elif " | " in line or " && " in line:
            found.append(f"{line}: two commands in one line")
    return found


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(FloeError) as error:
        call()
    return error.value.hint


def of_verdicts() -> Iterator[str]:
    for choices in (TargetErrors("FLEET"), ReplayChoices(ADVICE)):
        for finding in Finding:
            for last in (0, 7):
                for tail in (Unread.GONE, Origin(CHAIN, 7)):
                    for doubt in (None, Doubt(3, 7, 9)):
                        seen = [TargetReading(last, "t0", tail)] * 3
                        yield choices.error(IntentVerdict(finding, detail="x", doubt=doubt), seen).hint
        for reading in (None, TargetReading(7, "t0", Unread.GONE)):
            yield choices.no_checkpoint(reading).hint


def of_chains() -> Iterator[str]:
    registry = ChainRegistry(SETTINGS, TargetLimits(Accepting([">"]), 1000))
    yield raised(lambda: registry.preparer(CHAIN))
    later = Chain("us-east", "NODES", 1)
    yield raised(lambda: registry.check_may_begin(later, 7))
    registry.set_previous(later, {0: 7})
    yield raised(lambda: registry.check_may_begin(later, 7))
    for code in ("E-SUBJECT", "E-MSG-TOO-LARGE"):
        yield way_out(CHAIN, "FLEET", code, 7)
        refused: Any = Stopped("x", code=code)
        nothing: Any = None
        yield Recall(nothing, nothing, nothing, registry, nothing).refused(refused).hint
    yield documents.way_out(CHAIN, HOLE)
    for hint in ("", "mend it"):
        error = with_way_out(FloeError("x", hint=hint), advice.resume("FLEET", CHAIN))
        yield error.hint


def of_targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield oversize_hint("FLEET")
    yield raised(lambda: from_json("FLEET", b"[]"))
    yield raised(lambda: choose("FLEET", "fast", {"fast": "the stream says allow_batched false"}))


def of_replays() -> Iterator[str]:
    receipt = Receipt(REQUEST, (), 0, 0, True, 0.0)
    yield from (target.missing(ADVICE).hint, target.not_empty(ADVICE, INFO).hint, ADVICE.source(""))
    yield from (ADVICE.source("NODES"), ADVICE.anew(), ADVICE.holes(CHAIN, (HOLE, HOLE)))
    yield from (ADVICE.refused("E-SUBJECT"), ADVICE.refused("E-MSG-TOO-LARGE"))
    yield from (ADVICE.not_created(is_taken=True), ADVICE.not_created(is_taken=False))
    yield from (other(ADVICE, receipt).hint, unreadable(ADVICE, "x").hint)
    yield hole_error(ADVICE, CHAIN, HOLE).hint
    yield raised(lambda: target.recipe(REQUEST, None))
    for key in (receipt_key("BACK"), "ingress.BACK"):
        yield held_error(ADVICE, key, "somebody").hint
    yield from (survey.vanishing_error(CHAIN).hint, survey.damaged_error(CHAIN, ["a"]).hint)


async def test_every_command_of_a_hint_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_STATE", 0)
    hints = [*of_verdicts(), *of_chains(), *of_targets(monkeypatch), *of_replays()]

    assert [found for hint in hints for found in problems(hint)] == []
    assert len(hints) > 40


@pytest.mark.parametrize(("before", "after"), [("", "BACK_ALL"), ("BACK_ALL", "BACK_ALL_2")])
def test_a_prefix_of_its_own_is_proposed_where_another_stream_has_the_subjects(before: str, after: str) -> None:
    """`nats stream add` with these subjects would be refused as well."""
    request = Request("s", "F", "BACK", prefix=before)
    hint = Advice(request, ReplayOptions(create=True)).not_created(is_taken=True)

    assert "nats stream add" not in hint
    assert f"--subject-prefix {after} --create" in hint
