"""Partition of a feed, the unit of a lease and of a worker."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.chain import Chain
from common.errors import ConfigError, DataError, UsageError
from common.exits import config_source
from common.nats.api import durable_name_prefix, name_hash
from common.nats.kv import state_key
from common.sequences import SequenceRange
from common.service.reload import ReloadPlan, plan_entries
from common.settings.egress import FeedSettings
from common.settings.loader import changed_keys
from common.settings.root import Settings

THIS_INSTANCE = "this instance"  # the holder of a lease in the /status of its process

_EPHEMERAL = re.compile(r"floe-(?:start-)?[0-9a-f]{16}")
_DURABLE = re.compile(r"(floe_.+_([0-9]{1,5})_[0-9a-f]{16})_[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition `number` of the feed that `settings` describes, at `site`.

    `filter_subject`: the only subjects it takes; empty: all of the stream's.
    """

    site: str
    settings: FeedSettings
    number: int = 0
    filter_subject: str = ""

    @property
    def stream(self) -> str:
        return self.settings.stream

    @property
    def chain(self) -> Chain:
        return Chain(self.site, self.settings.name, partition=self.number)

    @property
    def durable(self) -> str:
        """Prefix of the names of its durable consumers, before a random end."""
        return durable_name_prefix(self.site, self.settings.name, self.number)

    def partition_of(self, durable: str) -> int | None:
        """Return the partition of the same feed, configured or not, that has this durable; None for another feed's."""
        found = _DURABLE.fullmatch(durable)
        if found is None or durable_name_prefix(self.site, self.settings.name, int(found[2])) != found[1]:
            return None
        return int(found[2])

    @property
    def filters(self) -> tuple[str, ...]:
        return (self.filter_subject,) if self.filter_subject else ()


def lease_key(feed: Chain) -> str:
    """Return the key of the one lease for all incarnations: its holder may begin the next."""
    return state_key("egress", feed.site, feed.feed, str(feed.partition))


def is_durable_of_site(durable: str, site: str) -> bool:
    return re.fullmatch(rf"floe_{site}_.+_{name_hash(site)}[0-9a-f]{{8}}_[0-9a-f]{{8}}", durable) is not None


def is_floe_consumer(consumer: str) -> bool:
    """True if a consumer of this name is one of Floe's, of any site and feed."""
    return (_DURABLE.fullmatch(consumer) or _EPHEMERAL.fullmatch(consumer)) is not None


def partitions_of(site: str, feed: FeedSettings, number: int | None = None) -> list[Partition]:
    """Return all partitions, or partition `number` alone. Raises UsageError if the feed has no such partition."""
    found = [Partition(site, feed, index, subject) for index, subject in enumerate(feed.filters())]
    if number is not None and number >= len(found):
        raise UsageError(f"partition {number} of {site}/{feed.name}: expected 0 to {len(found) - 1}")
    return found if number is None else [found[number]]


def require_feeds(feeds: Sequence[FeedSettings]) -> None:
    """Raise ConfigError if no feed is configured."""
    if not feeds:
        raise ConfigError(f"{config_source()}: egress.feeds: expected at least one feed, found none")


# Beginnings of keys that are compared feed by feed, or that egress does not use.
FEED_KEYS = ("egress.feeds[", "egress.defaults", "ingress.", "compaction.")
LAYOUT_KEYS = ("filter_subject", "partitions", "relay")  # they define the chains of a feed: `repartition` changes them


def plan_feeds(before: Settings, now: Settings, matched: Iterable[str] = ()) -> ReloadPlan:
    """Plan a reload by feeds; an entry with patterns is named `streams PATTERNS`. `matched`: the feeds that patterns
    made. Raises ConfigError if there is no feed any more.
    """
    require_feeds(now.egress.feeds_)
    old, new = ({feed.name: feed for feed in each.egress.feeds} for each in (before, now))
    old |= {name: feed for name in matched if (feed := before.egress.feed_named(name))}
    new |= {name: feed for name in old if name not in new and (feed := now.egress.feed_named(name))}
    for found, each in ((old, before), (new, now)):
        found |= {f"streams {feed.pattern}": feed for feed in each.egress.patterns}
    plan = plan_entries(before, now, FEED_KEYS, *({name: _work(f) for name, f in each.items()} for each in (old, new)))
    refused = dict(plan.refused)
    for name, former in old.items():
        later = former.model_copy(update={key: getattr(new.get(name, former), key) for key in LAYOUT_KEYS})
        refused |= changed_keys(former, later, f"egress.feeds[{former.pattern or former.name}]")
    return ReloadPlan(refused) if refused else plan


def _work(feed: FeedSettings) -> FeedSettings:
    """Return the settings without the patterns that chose the stream."""
    return feed if feed.is_pattern else feed.model_copy(update={"streams": bool(feed.streams), "except_": ()})


def next_feed(before: Settings, now: Settings, name: str) -> FeedSettings | None:
    """Return the feed that takes the place of the feed `name`; None: none, unless the next listing finds one."""
    former, found = before.egress.feed_named(name), now.egress.feed_named(name)
    is_still_matched = former and former.streams and found and (found.mirrors or not former.mirrors)
    return found if found and (is_still_matched or not found.streams) else None


def all_partitions(site: str, feeds: Sequence[FeedSettings]) -> list[Partition]:
    return [each for feed in feeds for each in partitions_of(site, feed)]


@dataclass(frozen=True, slots=True)
class Position:
    """Position to read from.

    `first`: the sequence to begin with. `until`: the last one to cover, None if reading continues without end. `lost`:
    holes below `first` or above it, under existing coverage, that the source no longer holds: they were archived once,
    so nothing may cover them again. `is_end`: the chain ends at `until`.
    """

    first: int
    until: int | None = None
    lost: tuple[SequenceRange, ...] = ()
    is_end: bool = False

    @property
    def fills_hole(self) -> bool:
        return self.until is not None and not self.is_end


def accounted_until(first: int, end: int) -> int:
    """Return the last sequence of which a chain needs no message any more: the end of its coverage (0: there is none),
    or the sequence before its beginning `first`.
    """
    return max(end, first - 1)


def next_position(first: int, end: int, gaps: Iterable[SequenceRange], source_first: int) -> Position:
    """Return the position: the first sequence from `first` (the chain's beginning) on that is not covered and can be.

    `end`: the end of coverage, 0 if there is none. `gaps`: the known holes below it, ascending. A hole is read again as
    far as the source holds it, from `source_first` on; the part before remains a hole.
    """
    if end < first:
        return Position(first)
    within = [each for gap in gaps if (each := gap.intersection(SequenceRange(first, end)))]
    lost = tuple(SequenceRange(g.first, min(g.last, source_first - 1)) for g in within if g.first < source_first)
    held = next((gap for gap in within if gap.last >= source_first), None)
    if held is None:
        return Position(end + 1, None, lost)
    return Position(max(held.first, source_first), held.last, lost)


def kv_error(document: str, hint: str) -> Callable[[str], DataError]:
    """Return a function that makes the error for an invalid value in the bucket (`KvDocument`)."""
    return lambda reason: DataError(f"{document}: {reason}", hint=hint, code="E-STATE-KV")
