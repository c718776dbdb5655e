"""The state of a rebuilt sampler, against brute force over the rows, for any cuts and merges."""

import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from common.archive.scan import ChainArchive
from common.archive.segment import Message
from common.sequences import SequenceRange
from egress.sampling.resume import SamplerRebuild
from tests.support.sampling import CHAIN, SECOND, SampledArchive, known_keys, sent

DURATION = 100  # seconds
LAST = 60

nodes = st.sampled_from(["a", "b", "c", "d"])
logs = st.lists(st.tuples(nodes, st.sampled_from([0, 1, 5, 30, 90]), st.booleans()), min_size=LAST, max_size=LAST)
cuts = st.lists(st.integers(1, LAST - 1), max_size=6, unique=True).map(lambda found: [*sorted(found), LAST])
merges = st.lists(st.tuples(st.integers(1, LAST), st.integers(1, LAST), st.integers(1, 3)), max_size=3).map(
    lambda found: [(min(a, b), max(a, b), level) for a, b, level in found]
)


def messages(log: list[tuple[str, int, bool]]) -> tuple[list[Message], list[Message]]:
    """Return all messages, and those that were kept as rows."""
    time, found, rows = 0, [], []
    for sequence, (node, pause, is_kept) in enumerate(log, 1):
        time += pause
        found.append(sent(sequence, node, time, sequence))
        rows += found[-1:] if is_kept else []
    return found, rows


def put_one(site: SampledArchive, log: list[Message], rows: list[Message], first: int, last: int, level: int) -> None:
    part = [m for m in rows if first <= m.sequence <= last]
    site.put(part, SequenceRange(first, last), examined=log[last - 1], level=level, group_bytes=200)


@settings(max_examples=30)
@given(logs, cuts, merges, st.integers(1, LAST))
def test_every_value_of_the_last_duration_is_known_by_its_last_row(
    log: list[tuple[str, int, bool]], ends: list[int], merged: list[tuple[int, int, int]], last: int
) -> None:
    examined, rows = messages(log)
    with tempfile.TemporaryDirectory() as folder:
        site = SampledArchive(Path(folder))
        # The position is after the last segment.
        ends = [*sorted({end for end in ends if end < last}), last]
        for first, end, level in [*[(before + 1, end, 0) for before, end in pairwise([0, *ends])], *merged]:
            if end <= last:
                put_one(site, examined, rows, first, end, level)
        rebuilt = SamplerRebuild(ChainArchive.listed(site.store, CHAIN), site.sampling, last).run()
        site.store.close()

    newest = examined[last - 1].timestamp_ns
    assert rebuilt.newest_ns == newest
    young = [m for m in rows if m.sequence <= last and m.timestamp_ns >= newest - DURATION * SECOND]
    expected = {m.subject.decode().split(".")[1]: (m.timestamp_ns, m.timestamp_ns, len(m.payload)) for m in young}
    assert {k.value: (k.seen_ns, k.copied_ns, k.size) for k in known_keys(rebuilt.sampler.freeze())} == expected
    assert rebuilt.rows == len(young)
