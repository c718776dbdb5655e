"""Which feeds at which sites, and which targets at which centres, the entries of `streams` become. Pure.

An entry of stream-replicator is a path from one stream to another. In Floe the way to the bucket (a feed) and
the way from it (a source of a target) are apart, so one feed may serve several targets, and entries that are
partitions of one stream become partitions of one feed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.migration.entries import Entries, Entry
from common.migration.notes import Note
from common.migration.read import Connection
from common.migration.shape import Given
from common.settings.overlap import first_overlap


@dataclass(slots=True)
class Path:
    """One entry: from a stream at `source` to a stream at `target`. `feed`: the keys of its feed."""

    given: Given
    source: Connection
    target: Connection
    feed: Entries
    notes: list[Note]
    target_notes: list[Note]

    @property
    def stream(self) -> str:
        return self.given.text("stream")

    @property
    def filter(self) -> str:
        """The filter subject; empty: the whole stream. `>` filters nothing."""
        text = self.given.text("filter_subject")
        return "" if text == ">" else text

    @property
    def target_stream(self) -> str:
        return self.given.text("target_stream") or self.stream

    @property
    def wishes(self) -> str:
        """Equal for entries that ask the same of a feed, filters apart."""
        return _text(self.feed)

    @property
    def route(self) -> tuple[object, str, str, str]:
        """Equal for entries that lead to the same place in the same way."""
        prefix, removed = (self.given.text(f"target_subject_{key}") for key in ("prefix", "remove"))
        return self.target.identity, self.target_stream, prefix, removed


@dataclass(slots=True)
class Feed:
    """A feed of a site: `paths` all ask the same of it and lead to different targets, or are its partitions,
    which `filters` then holds in their order.
    """

    name: str
    paths: list[Path]
    filters: tuple[str, ...]

    @property
    def routes(self) -> list[Path]:
        """One path for each place that it leads to."""
        return list({path.route: path for path in reversed(self.paths)}.values())[::-1]


@dataclass(slots=True)
class Site:
    name: str
    connection: Connection
    feeds: list[Feed] = field(default_factory=list)


@dataclass(slots=True)
class Target:
    """A target stream. `sources`: the site and feed that flow into it, with the path that says how."""

    stream: str
    sources: list[tuple[Site, Feed, Path]] = field(default_factory=list)


@dataclass(slots=True)
class Centre:
    connection: Connection
    targets: list[Target] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the paths become."""

    sites: Sequence[Site]
    centres: Sequence[Centre]


def plan(name: str, paths: Sequence[Path]) -> Plan:
    """The sites and centres that do what `paths` say; a first site is called `name`."""
    sites = list(_sites(name, paths))
    return Plan(sites, _centres(sites))


def _sites(name: str, paths: Sequence[Path]) -> Iterable[Site]:
    by_source: dict[object, list[Path]] = defaultdict(list)
    for path in paths:
        by_source[path.source.identity].append(path)
    for number, group in enumerate(by_source.values(), 1):
        tail = f"-{number}" if number > 1 else ""
        yield Site(name[: 63 - len(tail)] + tail, group[0].source, _feeds(group))


def _feeds(paths: Sequence[Path]) -> list[Feed]:
    feeds: list[Feed] = []
    for group, filters in _bundles(paths):
        shared = next((feed for feed in feeds if _may_share(feed, group, filters)), None)
        if shared is not None:
            shared.paths += group
        else:
            feeds.append(Feed(_name(group[0], {feed.name for feed in feeds}), group, filters))
    return feeds


def _bundles(paths: Sequence[Path]) -> list[tuple[list[Path], tuple[str, ...]]]:
    """Entries that are partitions of one another together, the others alone; in the order of the file."""
    groups: dict[object, list[Path]] = defaultdict(list)
    for path in paths:
        groups[path.wishes, path.route].append(path)
    found = []
    for group in groups.values():
        filters = tuple(path.filter for path in group)
        if len(group) > 1 and first_overlap(filters) is None:
            found.append((group, filters))
        else:
            found += [([path], (path.filter,)) for path in group]
    return found


def _may_share(feed: Feed, group: Sequence[Path], filters: tuple[str, ...]) -> bool:
    """Whether the feed is what the group asks for, and none of its targets would get it twice."""
    taken = {path.route[:2] for path in feed.paths}
    return (
        feed.filters == filters
        and feed.paths[0].wishes == group[0].wishes
        and group[0].route[:2] not in taken
    )


def _name(path: Path, taken: set[str]) -> str:
    """The stream's name; where that is taken, with the entry's name or a number behind it."""
    own = path.given.text("name").strip()
    wanted = [path.stream, *([f"{path.stream}_{own}"] if own else [])]
    numbered = (f"{path.stream}_{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (*wanted, *numbered) if name not in taken)


def _centres(sites: Sequence[Site]) -> list[Centre]:
    centres: dict[object, Centre] = {}
    for site, feed in ((each, feed) for each in sites for feed in each.feeds):
        for path in feed.routes:
            centre = centres.setdefault(path.target.identity, Centre(path.target))
            target = next((t for t in centre.targets if t.stream == path.target_stream), None)
            if target is None:
                target = Target(path.target_stream)
                centre.targets.append(target)
            target.sources.append((site, feed, path))
    return list(centres.values())


def within(inner: str, outer: str) -> bool:
    """Whether every subject that matches `inner` matches `outer`."""
    inside, outside = inner.split("."), outer.split(".")
    for mine, its in zip(inside, outside, strict=False):
        if its == ">":
            return True
        if mine == ">" or (its not in ("*", mine)):
            return False
    return len(inside) == len(outside)


def _text(entries: Sequence[Entry]) -> str:
    values = [
        _text(entry.value) if isinstance(entry.value, Entries) else repr(entry.value) for entry in entries
    ]
    return repr([(entry.key, value) for entry, value in zip(entries, values, strict=True)])
