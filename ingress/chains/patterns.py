"""Feeds of the store that the patterns of a target take: a pure plan, and those that this process has taken."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

from common.archive.catalog import FeedId
from common.chain import Chain
from common.logs import get_logger
from common.settings.ingress import SourceSettings, TargetSettings

log = get_logger(__name__)

MAX_SHOWN_FEEDS = 20  # names in a line


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The feeds that patterns match. `taken`: those that flow in, each with its entry; `untaken`: those that do not,
    each with the reason.
    """

    taken: Mapping[FeedId, SourceSettings] = field(default_factory=dict)
    untaken: Mapping[FeedId, str] = field(default_factory=dict)

    def untaken_texts(self) -> list[str]:
        """Return the first MAX_SHOWN_FEEDS of the feeds that do not flow in, with the reasons. From any thread."""
        return [f"{'/'.join(feed)}: {reason}" for feed, reason in nsmallest(MAX_SHOWN_FEEDS, self.untaken.items())]


def plan_sources(
    settings: TargetSettings,
    feeds: Collection[FeedId],
    stored: Collection[FeedId],
    taken: Collection[FeedId] = frozenset(),
) -> SourcePlan:
    """Plan the feeds of patterns. `feeds`: those in the store, and `stored`: those with a position of the target;
    `taken`: by an earlier plan of this process. If a limit is reached, those that are taken come first, then those that
    are stored, then the others by name.
    """
    flowing, untaken = dict[FeedId, SourceSettings](), dict[FeedId, str]()
    feeds_by_entry: dict[int, list[FeedId]] = {}
    for feed, numbers in settings.matched_feeds({*feeds, *stored}).items():
        if len(numbers) == 1:
            feeds_by_entry.setdefault(numbers[0], []).append(feed)
        else:
            entries = " and ".join(f"sources.{number}" for number in numbers)
            untaken[feed] = f"{entries} match it: name it in one of them"
    for number, matched in feeds_by_entry.items():
        source, counts = settings.sources[number], Counter[str]()
        for feed in sorted(matched, key=lambda each: (each not in taken, each not in stored, each)):
            if feed[0] not in counts and len(counts) >= source.max_sites:
                untaken[feed] = f"its site is beyond max_sites of sources.{number}, {source.max_sites}"
            elif counts[feed[0]] >= source.max_chains:
                untaken[feed] = f"its site has more feeds than max_chains of sources.{number}, {source.max_chains}"
            else:
                counts[feed[0]] += 1
                flowing[feed] = source
    return SourcePlan(flowing, untaken)


class PatternSources:
    """The feeds that one target has taken by patterns in this process, which gives none of them up."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings, self._patterns = settings, [*settings.patterns.values()]
        self._found, self.plan = set[FeedId](), SourcePlan()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def may_take(self, feed: FeedId) -> bool:
        """True if a pattern matches the feed, and no plan has decided about it."""
        return feed not in self._found and any(source.matches(*feed) for source in self._patterns)

    def take(self, feeds: Collection[FeedId], positions: Collection[Chain]) -> Mapping[FeedId, SourceSettings]:
        """Plan with `feeds` of the store, and return those that are taken now."""
        stored = {(chain.site, chain.feed) for chain in positions}
        has_new = any(map(self.may_take, known := {*feeds, *stored}))
        self._found |= known
        if not has_new:
            return {}
        former, self.plan = self.plan, plan_sources(self._settings, self._found, stored, self.plan.taken)
        new = {feed: source for feed, source in self.plan.taken.items() if feed not in former.taken}
        context: dict[str, object] = {"target": self._settings.stream}
        if begun := ["/".join(feed) for feed in new if feed not in stored]:
            context |= {"count": len(begun), "feeds": ", ".join(begun[:MAX_SHOWN_FEEDS])}
            log.info("feeds taken", action="feeds_taken", **context)
        if wrong := [feed for feed in self.plan.untaken if feed not in former.untaken]:
            texts = [f"{'/'.join(feed)}: {self.plan.untaken[feed]}" for feed in wrong[:MAX_SHOWN_FEEDS]]
            context |= {"count": len(wrong), "feeds": "; ".join(texts)}
            log.error("feeds refused", action="feeds_refused", **context)
        return new
