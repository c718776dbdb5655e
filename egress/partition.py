"""One partition of one feed: what a lease is for, and what one worker freezes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from common.chain import Chain
from common.errors import ConfigError
from common.service.pasting import source
from common.settings.egress import FeedSettings

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_DURABLE = re.compile(r"(floe_.+_([0-9]{1,5})_[0-9a-f]{16})_[0-9a-f]{8}")


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
        """What the names of its durable consumers begin with, before a random end."""
        return _durable(self.site, self.settings.name, self.partition)

    def partition_of(self, durable: str) -> int | None:
        """Whose durable this is: a partition of the same feed, configured or not; None: it is another's."""
        found = _DURABLE.fullmatch(durable)
        if found is None or _durable(self.site, self.settings.name, int(found[2])) != found[1]:
            return None
        return int(found[2])

    @property
    def filters(self) -> tuple[str, ...]:
        """As `chain.json` holds them."""
        return (self.filter_subject,) if self.filter_subject else ()


def is_of_site(durable: str, site: str) -> bool:
    """Whether a consumer of this name is the durable of some slice of `site`, configured or not."""
    return re.fullmatch(rf"floe_{site}_.+_{_hash(site)}[0-9a-f]{{8}}_[0-9a-f]{{8}}", durable) is not None


def _durable(site: str, feed: str, partition: int) -> str:
    """Legal, and unlike that of any other slice: the hashes tell sites and feeds apart whose names look alike
    when they stand in a row (`A_1` and `B`, `A` and `1_B`).
    """
    mark = _hash(site) + _hash(f"{site}/{feed}/{partition}")
    return f"floe_{site}_{_UNSAFE.sub('-', feed)[:100]}_{partition}_{mark}"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def slices(site: str, feed: FeedSettings) -> list[Slice]:
    """All partitions of a feed, in their order."""
    return [Slice(site, feed, number, subject) for number, subject in enumerate(feed.filters())]


def require_feeds(feeds: Sequence[FeedSettings]) -> None:
    """Raises ConfigError where there is nothing to freeze."""
    if not feeds:
        raise ConfigError(f"{source()}: egress.feeds: expected at least one feed, found none")


def all_slices(site: str, feeds: Sequence[FeedSettings]) -> list[Slice]:
    """All partitions of all feeds, in the order of the configuration."""
    return [each for feed in feeds for each in slices(site, feed)]
