"""One partition of one feed: what a lease is for, and what one worker freezes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.chain import Chain
from common.settings.egress import FeedSettings


@dataclass(frozen=True, slots=True)
class Slice:
    """Partition `partition` of the feed that `settings` describes, at `site`.

    `filter_subject`: the only subjects it takes; empty: all of the stream's.
    """

    site: str
    settings: FeedSettings
    partition: int = 0
    filter_subject: str = ""

    @property
    def stream(self) -> str:
        return self.settings.stream

    @property
    def chain(self) -> Chain:
        """Its chain in incarnation 0000."""
        return Chain(self.site, self.settings.name, partition=self.partition)

    @property
    def durable(self) -> str:
        """What the names of its durable consumers begin with."""
        return f"floe_{self.site}_{self.settings.name}_{self.partition}"

    @property
    def filters(self) -> tuple[str, ...]:
        """As `chain.json` holds them."""
        return (self.filter_subject,) if self.filter_subject else ()


def slices(site: str, feed: FeedSettings) -> list[Slice]:
    """All partitions of a feed, in their order."""
    return [Slice(site, feed, number, subject) for number, subject in enumerate(feed.filters())]


def all_slices(site: str, feeds: Sequence[FeedSettings]) -> list[Slice]:
    """All partitions of all feeds, in the order of the configuration."""
    return [each for feed in feeds for each in slices(site, feed)]
