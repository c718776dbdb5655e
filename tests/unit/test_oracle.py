"""The oracle of the tests: each class of damage is found and named."""

import ast
import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.archive.segment import Message
from common.chain import Chain
from common.errors import OutcomeUnknown, Unavailable
from infra.oracle import OracleResult, Trace, compare, fingerprint, prefix_subject, sum_comparisons
from tests.scenarios.simulated import added
from tests.support.basics import answered
from tests.support.kinds import verdict as second_try
from tests.support.oracle import CLASSES, classes, compare_target
from tests.unit.test_house import imported


def message(sequence: int, **changes: object) -> Message:
    made = Message(sequence, sequence * 1000, b"a.b", b"NATS/1.0\r\nA: 1\r\n\r\n", b"payload %d" % sequence)
    return replace(made, **changes)


def messages(*sequences: int) -> list[Message]:
    return [message(sequence) for sequence in sequences]


def verdict(found: list[Message], *, expected: list[Message] | None = None, may_be_gone: bool = False) -> OracleResult:
    whole = messages(*range(1, 11)) if expected is None else expected
    return compare(Trace.of(whole), Trace.of(found), may_be_gone=may_be_gone)


def test_sees_what_changed_and_two_messages_that_changed_places_under_each_others_sequence() -> None:
    contents = {"subject": b"a.c"}, {"payload": b""}, {"headers": None}, {"headers": b"NATS/1.0\r\nA:1\r\n\r\n"}
    for change in (*contents, {"headers": b"NATS/1.0\r\nA: 1\r\nA: 1\r\n\r\n"}):
        result = verdict([*messages(1, 2, 3, 4), message(5, **change), *messages(6, 7, 8, 9, 10)])
        assert result.summary() == "lost 0, repeated 0, out of order 0, altered 1", change
        assert result.examples == ("altered: sequence 5: subject, headers or payload differ",)
    result = verdict([*messages(*range(1, 10)), message(10, timestamp_ns=10_001)])
    assert (result.altered, result.examples) == (1, ("altered: sequence 10: timestamp 10000 became 10001",))
    swapped = [message(1, payload=b"payload 2"), message(2, payload=b"payload 1"), *messages(*range(3, 11))]
    assert verdict(swapped).altered == 2


def test_takes_what_the_source_deleted_since_for_gone_and_not_for_damage() -> None:
    held = messages(1, 2, 3, 7, 8, 9, 10)
    assert verdict(messages(*range(1, 11)), expected=held).unexpected == 3
    gone = verdict(messages(*range(1, 11)), expected=held, may_be_gone=True)
    assert (gone.is_ok, gone.gone) == (True, 3)
    twice = verdict(messages(1, 2, 2, 3), expected=messages(1, 3), may_be_gone=True)
    assert (twice.gone, twice.repeated) == (1, 1)
    # Sequences after the last one of the source are not excused.
    behind = verdict(messages(1, 2, 3), expected=messages(1, 2), may_be_gone=True)
    assert (behind.gone, behind.unexpected) == (0, 1)


def test_compares_under_the_subject_that_the_target_gives() -> None:
    source = messages(1, 2)
    target = [replace(one, subject=b"fleet." + one.subject) for one in source]

    assert compare(Trace.of(source, prefix_subject("fleet")), Trace.of(target)).is_ok
    assert compare(Trace.of(source), Trace.of(target)).altered == 2


def test_sums_up_chains_and_names_the_chain_of_an_example() -> None:
    whole = Trace.of(messages(1, 2, 3))
    found = {"us-east/NODES": messages(1, 2), "eu-west/NODES": messages(1, 1, 2, 3)}
    both = sum_comparisons([compare(whole, Trace.of(held), name=name) for name, held in found.items()])

    assert both.summary() == "lost 1, repeated 1, out of order 0, altered 0"
    assert both.examples == ("us-east/NODES: lost: sequence 3", "eu-west/NODES: repeated: sequence 1 came again")


def test_refuses_an_expectation_that_is_itself_out_of_order() -> None:
    with pytest.raises(ValueError, match="sequence 1 comes after 2"):
        compare(Trace.of(messages(2, 1)), Trace())


def test_a_fingerprint_keeps_the_parts_of_a_message_apart_and_a_trace_takes_24_bytes_of_any_size() -> None:
    parts = [(b"ab", None, b"c"), (b"a", None, b"bc"), (b"a", b"", b"bc"), (b"a", b"b", b"c"), (b"a", b"bc", b"")]
    assert len({fingerprint(*each) for each in parts}) == 5
    trace = Trace.of([message(1, payload=b"x" * 100_000), message(2)])
    assert sum(part.itemsize for part in (trace.sequences, trace.timestamps, trace.fingerprints)) == 24
    assert trace.raw_bytes > 100_000


ALPHA, BETA = Chain("alpha", "NODES"), Chain("beta", "NODES")
HELD = {ALPHA: [*range(1, 11)], BETA: [2, 5, 7]}


def of_target(found: dict[Chain, list[Message]], foreign: int = 0) -> OracleResult:
    """Compare a target that holds `found` with the expected `HELD`."""
    expected = {chain: Trace.of(messages(*held)) for chain, held in HELD.items()}
    return compare_target(expected, {chain: Trace.of(held) for chain, held in found.items()}, foreign)


def whole(**changed: list[Message]) -> dict[Chain, list[Message]]:
    """Return the content of an undamaged target, except for the chains of the sites in `changed`."""
    return {chain: changed.get(chain.site, messages(*held)) for chain, held in HELD.items()}


def test_names_every_class_of_damage_of_a_whole_target() -> None:
    for found, kind, count, example in (
        (whole(alpha=messages(*range(3, 11))), "lost_prefix", 2, "0/0: lost: sequence 1"),
        (whole(beta=messages(2, 7)), "lost_middle", 1, "lost: sequence 5"),
        (whole(alpha=messages(*range(1, 8))), "lost_postfix", 3, "lost: sequence 8"),
        (whole(beta=[]), "lost_postfix", 3, "lost: sequence 2"),
        (whole(beta=messages(2, 5, 5, 7)), "repeated", 1, "repeated: sequence 5 came again"),
        (whole(beta=messages(2, 5, 7, 2)), "repeated", 1, "repeated: sequence 2 came again"),
        (whole(beta=messages(5, 2, 7)), "out_of_order", 1, "sequence 2 came after 5"),
        (whole(beta=[*messages(2, 5), message(7, payload=b"!")]), "altered", 1, "altered: sequence 7"),
        (whole(beta=messages(2, 5, 6, 7)), "unexpected", 1, "sequence 6 was never published"),
        ({**whole(), Chain("beta", "NODES", 1): messages(1, 2)}, "unexpected", 2, "(no such chain)"),
    ):
        result = of_target(found)

        assert not result.is_ok
        assert classes(result) == {name: count if name == kind else 0 for name in CLASSES}
        assert example in result.report()


def test_a_whole_target_without_damage_is_exact_and_what_has_no_or_another_provenance_is_not() -> None:
    assert (of_target(whole()).is_ok, of_target(whole()).found) == (True, 13)
    foreign = of_target(whole(), foreign=2)
    assert (foreign.is_ok, foreign.unexpected) == (False, 2)
    assert "2 messages without provenance" in foreign.report()
    swapped = of_target({ALPHA: messages(*HELD[BETA]), BETA: messages(*HELD[ALPHA])})
    assert (swapped.lost, swapped.unexpected, swapped.is_ok) == (7, 7, False)


# Evidence

ROOT = Path(__file__).parents[2]
SOAK = ROOT / "tests" / "soak" / "__main__.py"


def counted() -> set[str]:
    """Return the paths that every run counts as its own, read without running anything."""
    for node in ast.parse(SOAK.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "BESIDE":
            return {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    raise AssertionError("BESIDE is gone")


def test_what_the_runs_import_of_tests_counts_for_their_evidence():
    waiting, seen = [SOAK], set()
    while waiting:
        if (path := waiting.pop()) not in seen:
            seen.add(path)
            waiting += [each for each in imported(path) if each.exists()]
    names = {str(path.relative_to(ROOT)) for path in seen}
    assert len(names) > 100
    paths, parts = counted(), ("egress/", "ingress/", "compaction/")
    known = (*parts, *(f"{path}/" for path in paths))
    assert {name for name in names - paths if not name.startswith(known)} == set()
    assert all((ROOT / path).exists() for path in paths)


def ran(*seeds: str, code: str = "a", ok: bool = True, messages: int = 1) -> dict[str, Any]:
    return {"ok": ok, "code": code, "seeds": [*seeds], "messages": messages}


def test_results_of_other_seeds_add_up_and_those_of_other_files_or_the_same_seeds_do_not():
    assert added(ran("1-20"), ran("21-40")) == ran("1-40", messages=2)
    assert added(ran("41-60"), ran("1-20")) == ran("1-20", "41-60", messages=2)
    for before in ({}, ran("1-20", code="b"), ran("1-20", ok=False), ran("21-50"), {"ok": True, "code": "a"}):
        assert added(before, ran("50-60")) == ran("50-60")


# Second tries


def test_only_few_real_tests_get_a_second_try() -> None:
    for failed, why in (
        ({"a": "real"}, ""),
        ({"a": "real", "b": "real"}, ""),
        ({"a": "real", "b": "real", "c": "real"}, "3 tests failed: expected at most 2 for a second try"),
        ({"a": "pure"}, "only real tests get a second try: a is pure"),
        ({"a": "real", "b": "simulated"}, "only real tests get a second try: b is simulated"),
        ({}, "no test failed, and yet the run did"),
    ):
        assert second_try(failed) == why


def test_this_test_is_pure(request: pytest.FixtureRequest) -> None:
    assert [each.name for each in request.node.iter_markers() if each.name in ("pure", "real", "simulated")] == ["pure"]


@pytest.mark.simulated
async def test_what_is_marked_runs_in_simulated_time(request: pytest.FixtureRequest) -> None:
    began = time.perf_counter()
    await asyncio.sleep(500)
    assert time.perf_counter() - began < 60


async def test_a_question_without_an_answer_is_asked_again() -> None:
    results = [Unavailable("down"), OutcomeUnknown("late"), 7]

    async def ask() -> object:
        if isinstance(result := results.pop(0), Exception):
            raise result
        return result

    assert (await answered(ask), results) == (7, [])
