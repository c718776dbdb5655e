"""The choice of snapshots to try, against brute force, and of snapshots to prune."""

from hypothesis import given
from hypothesis import strategies as st

from common.archive.documents import SnapshotRef, newest_first
from common.archive.keys import Layout, StateName
from common.chain import Chain
from compaction.tombstones import KEPT_SNAPSHOTS, outdated_snapshots
from egress.sampling.snapshot import at_or_before, followable, may_match_digest, rebuild_reason

CHAIN = Chain("us-east", "NODES")
DIGESTS = st.sampled_from(["0" * 16, "1" * 16, "a" * 16])


def ref(position: int, digest: str = "0" * 16, modified: float = 0.0) -> SnapshotRef:
    name = StateName(CHAIN, position, digest)
    return SnapshotRef(name, Layout().state(name), 100, modified)


refs = st.lists(
    st.builds(ref, st.integers(1, 12), DIGESTS, st.integers(0, 5).map(float)), max_size=12, unique_by=lambda r: r.key
)
sequences = st.integers(1, 13)


LAST = 14  # last sequence of the source


def is_exact(snapshot: SnapshotRef, position: int, source_first: int) -> bool:
    """True if the sampler sees every sequence: below the position in the snapshot, then in the source."""
    seen = [*range(1, snapshot.position), *range(max(source_first, snapshot.position), LAST + 1)]
    return seen == list(range(1, LAST + 1)) and snapshot.position <= position


@given(refs, sequences, sequences)
def test_exactly_those_are_followed_or_built_upon_that_lead_to_the_very_state_the_newest_first(
    snapshots: list[SnapshotRef], position: int, source_first: int
) -> None:
    followed, built = followable(snapshots, position, source_first), at_or_before(snapshots, position)
    assert set(followed) == {r for r in snapshots if is_exact(r, position, source_first)}
    assert set(built) == {r for r in snapshots if r.position <= position}
    for found in (followed, built):
        places = [(r.position, r.modified) for r in found]
        assert (places, found) == (sorted(places, reverse=True), sorted(found, key=newest_first))


def test_a_label_that_was_lost_hides_no_snapshot() -> None:
    assert may_match_digest("", "settings")
    assert may_match_digest("settings", "settings")
    assert not may_match_digest("other", "settings")


def test_the_reason_of_a_rebuild() -> None:
    assert rebuild_reason(True, True, "now", "now") == "damaged"
    assert rebuild_reason(True, False, "now", "now") == "source"
    assert rebuild_reason(False, False, "now", "now") == "damaged"  # segments of these settings, and no snapshot
    assert rebuild_reason(False, False, "before", "now") == "settings"
    assert rebuild_reason(False, False, "", "now") == "settings"


ages = st.integers(0, 20).map(float)


@given(refs, ages, st.integers(0, 10).map(float))
def test_pruning_keeps_the_newest_the_young_and_the_last_stored(
    snapshots: list[SnapshotRef], now: float, grace: float
) -> None:
    going = outdated_snapshots(snapshots, now, grace)
    positions = [r.position for r in going]
    assert positions == sorted(positions), "a stop leaves the better ones"
    kept = [r for r in snapshots if r not in going]
    newest = sorted(snapshots, key=newest_first)[:KEPT_SNAPSHOTS]
    assert set(newest) <= set(kept)
    assert all(now - r.modified > grace for r in going)
    last = max((r.modified for r in snapshots), default=0.0)
    assert {r for r in snapshots if r.modified == last} <= set(kept)
    assert [r for r in kept if r not in newest and r.modified != last and now - r.modified > grace] == []
