"""Mistakes of compaction and retention."""

from dataclasses import replace
from typing import Any

import compaction.merge
import compaction.retention
import compaction.run
from common.archive.store import SegmentStore
from common.sequences import SequenceRange
from compaction.retention import TargetNeeds
from tests.sim.mutants.registry import change, changing, mutant


@mutant
def merge_loses_a_row() -> None:
    """A merge leaves out the last row of each batch of several rows."""

    @changing(compaction.merge, "union")
    def losing(union: Any, segments: Any, open_segment: Any) -> Any:
        for batch in union(segments, open_segment):
            yield batch.slice(0, batch.num_rows - 1) if batch.num_rows > 1 else batch


@mutant
def inputs_deleted_before_the_output() -> None:
    """A merge deletes its inputs before its output is durable."""

    @changing(compaction.run, "merge")
    def hasty(merge: Any, store: SegmentStore, output: Any) -> Any:
        for ref in output.inputs[:-1]:
            store.delete(ref)
        return merge(store, output)


@mutant
def retention_without_needs() -> None:
    """Retention deletes by age segments that targets still need."""
    change(compaction.retention, "read_needs", lambda _: lambda _chains, _sources: TargetNeeds())


@mutant
def coverage_of_a_merge_too_wide() -> None:
    """A merged segment covers one sequence more than its inputs."""

    @changing(compaction.merge, "merged_footer")
    def wide(merged_footer: Any, output: Any, *more: Any) -> Any:
        footer = merged_footer(output, *more)
        return replace(footer, coverage=SequenceRange(footer.coverage.first, footer.coverage.last + 1))
