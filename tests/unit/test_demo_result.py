"""The demo's verdict: it can fail."""

import importlib.util

import pytest

from common.archive.segment import Message
from common.chain import Chain
from common.clock import SystemClock
from common.errors import ConfigError
from infra.demo.compare import COLUMNS, ArchivedChain, ChainReadings, DemoResult, worst_comparison
from infra.demo.demo import StepView, run_demo
from infra.demo.world import PublishLoad
from infra.oracle import OracleResult, Trace

CHAIN = Chain("us-east", "NODES")


def trace(*sequences: int) -> Trace:
    return Trace.of(Message(sequence, sequence, b"s", None, b"%d" % sequence) for sequence in sequences)


def result(readings: ChainReadings, *problems: str) -> DemoResult:
    return DemoResult((readings,), published=3, publishing_seconds=1.0, seconds=2.0, problems=problems)


def whole(**changes: Trace) -> ChainReadings:
    places = {"source": trace(1, 2, 3), "archive": trace(1, 2, 3), "target": trace(1, 2, 3), **changes}
    source, archive, target = places.values()
    return ChainReadings(CHAIN, source, ArchivedChain(archive, stored_bytes=3), target, delays=(500, 100, 300))


def sampled(left_out: int, *target: int) -> ChainReadings:
    return ChainReadings(CHAIN, trace(1, 2, 3), ArchivedChain(trace(1, 3), left_out=left_out), trace(*target))


def test_is_well_where_all_three_places_agree_whatever_the_source_deleted_later() -> None:
    assert result(whole()).is_ok
    assert result(whole()).comparison().summary() == "lost 0, repeated 0, out of order 0, altered 0"
    deleted = result(whole(source=trace(1, 3)))
    assert deleted.is_ok
    assert "1 of them are no longer in the sources" in " ".join(deleted.summary_lines())


DAMAGES = [
    ({"target": trace(1, 3)}, "lost 1, repeated 0, out of order 0, altered 0"),
    ({"target": trace(1, 2, 2, 3)}, "lost 0, repeated 1, out of order 0, altered 0"),
    ({"target": trace(1, 3, 2)}, "lost 0, repeated 0, out of order 1, altered 0"),
    ({"archive": trace(1, 3), "target": trace(1, 3)}, "lost 1, repeated 0, out of order 0, altered 0"),
    ({"archive": trace(1, 3)}, "lost 0, repeated 0, out of order 0, altered 0, unexpected 1"),
]


@pytest.mark.parametrize(("changes", "line"), DAMAGES)
def test_names_the_damage_between_any_two_places(changes: dict[str, Trace], line: str) -> None:
    assert not result(whole(**changes)).is_ok
    assert result(whole(**changes)).comparison().summary() == line


def test_fails_for_other_problems_and_for_nothing_at_all_and_counts_the_most_damage() -> None:
    assert not result(whole(), "us-east/NODES/0000/0: a hole in the archive: 5..6").is_ok
    assert not DemoResult((), 0, 0.0, 0.0).is_ok
    assert worst_comparison([OracleResult(repeated=1), OracleResult(lost_middle=2), OracleResult()]).lost == 2


def test_a_program_reads_the_same_verdict_and_how_far_behind_half_and_all_were() -> None:
    document = result(whole(target=trace(1, 2, 2))).to_json()

    assert (document["ok"], document["lost"], document["repeated"]) == (False, 1, 1)
    assert document["chains"][0]["seconds_behind"] == {"median": 0.3, "most": 0.5}
    assert ChainReadings(CHAIN, trace(), ArchivedChain(), trace()).delay_quantile(0.5) == 0


def test_what_the_ledger_left_out_is_not_lost_and_another_number_than_is_missing_is_damage() -> None:
    found = sampled(1, 1, 3)

    assert result(found).is_ok
    assert "1 of them were sampled out" in " ".join(result(found).summary_lines())
    assert (found.row()[1:5], len(found.row())) == (("3", "1", "2", "2"), len(COLUMNS))
    assert not result(sampled(1, 1)).is_ok, "one is missing at the target"
    for left_out in (0, 2):
        wrong = result(sampled(left_out, 1, 3))
        assert not wrong.is_ok
        assert f"missing 1, expected {left_out} by the ledger" in " ".join(wrong.comparison().examples)


async def test_without_pyspark_the_demo_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail before a server starts: it once took 20 s, and the line named a failed compaction."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else found(name))
    load = PublishLoad(seconds=1, seed=1, rate=1)
    with pytest.raises(ConfigError, match="expected pyspark, found none; in a checkout of Floe: pip install"):
        await run_demo(load, StepView(), SystemClock())
