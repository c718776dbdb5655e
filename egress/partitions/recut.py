"""What a repartition comes to: pure, from the old cut, the new one, and how far each partition is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common.segments.documents import ChainDocument, StreamDocument
from common.settings.egress import FeedSettings, PartitionSettings


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an old partition is: where its chain begins, and where its coverage ends (0: there is none)."""

    first: int
    end: int

    @property
    def through(self) -> int:
        """The last sequence that needs no reading any more."""
        return max(self.end, self.first - 1)


def common_end(reaches: Sequence[Reach]) -> int:
    """Where all partitions are to end: the furthest that one of them is."""
    return max(reach.through for reach in reaches)


def next_document(
    config: Mapping[str, object],
    created: str,
    ends: Mapping[int, int],
    cut: Sequence[ChainDocument],
    end: int,
) -> StreamDocument:
    """The `stream.json` of the incarnation that goes on behind `end`, cut as `cut` says.

    `ends`: where the coverage of each old partition ends.
    """
    chains = tuple(replace(each, first=end + 1) for each in cut)
    return StreamDocument(config, created, ends, chains, continues=True)


def settings_of(cut: Sequence[ChainDocument], settings: FeedSettings) -> FeedSettings:
    """The settings of a feed as they were when it was cut like that."""
    filters = tuple(each.filters[0] if each.filters else "" for each in cut)
    as_list = len(filters) > 1
    return settings.model_copy(
        update={
            "partitions": filters if as_list else PartitionSettings(),
            "filter_subject": "" if as_list else filters[0],
            "relay": cut[0].relay,
        }
    )
