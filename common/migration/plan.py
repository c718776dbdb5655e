"""Which feeds at which sites, and which targets at which centres, the entries of `streams` become. Pure.

An entry of stream-replicator is a path from one stream to another. In Floe the way to the bucket (a feed) and
the way from it (a source of a target) are apart, so one feed may serve several targets, and entries that are
partitions of one stream become partitions of one feed.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.migration.entries import Entries, Variable, YamlEntry
from common.migration.read import Connection, Given, Note, convert, read_url
from common.settings.yaml import Problems
from common.subjects import first_overlap


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
class PlannedFeed:
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
    feeds: list[PlannedFeed] = field(default_factory=list)


@dataclass(slots=True)
class PlannedTarget:
    """A target stream. `sources`: the site and feed that flow into it, with the path that says how."""

    stream: str
    sources: list[tuple[Site, PlannedFeed, Path]] = field(default_factory=list)


@dataclass(slots=True)
class Centre:
    connection: Connection
    targets: list[PlannedTarget] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Everything that the paths become."""

    sites: Sequence[Site]
    centres: Sequence[Centre]


def plan(name: str, paths: Sequence[Path]) -> MigrationPlan:
    """The sites and centres that do what `paths` say; a first site is called `name`."""
    sites = list(_sites(name, paths))
    return MigrationPlan(sites, _centres(sites))


def _sites(name: str, paths: Sequence[Path]) -> Iterable[Site]:
    by_source: dict[object, list[Path]] = defaultdict(list)
    for path in paths:
        by_source[path.source.identity].append(path)
    for number, group in enumerate(by_source.values(), 1):
        tail = f"-{number}" if number > 1 else ""
        yield Site(name[: 63 - len(tail)] + tail, group[0].source, _feeds(group))


def _feeds(paths: Sequence[Path]) -> list[PlannedFeed]:
    feeds: list[PlannedFeed] = []
    for group, filters in _bundles(paths):
        shared = next((feed for feed in feeds if _may_share(feed, group, filters)), None)
        if shared is not None:
            shared.paths += group
        else:
            feeds.append(PlannedFeed(_name(group[0], {feed.name for feed in feeds}), group, filters))
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


def _may_share(feed: PlannedFeed, group: Sequence[Path], filters: tuple[str, ...]) -> bool:
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
                target = PlannedTarget(path.target_stream)
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


def _text(entries: Sequence[YamlEntry]) -> str:
    values = [
        _text(entry.value) if isinstance(entry.value, Entries) else repr(entry.value) for entry in entries
    ]
    return repr([(entry.key, value) for entry, value in zip(entries, values, strict=True)])


#: Keys of an entry without a counterpart, and why.
LEFT_OUT = {
    "ephemeral": "nothing is copied again at a start: Floe goes on where it stood",
    "target_initiated": "Floe always runs at both ends: egress at the source, ingress at the target",
    "leader_election_name": "several instances share the work by leases, without a key; see lease_ttl",
}

_STARTS = ("start_at_end", "start_sequence", "start_delta", "start_time")  # the first that is set counts
_MODES = ("inspect_field", "inspect_header", "inspect_subject_token")
_ZERO_TIME = "0001-01-01T00:00:00Z"


def feed_of(stream: Given, problems: Problems) -> tuple[Entries, list[Note]]:
    """The keys of the feed but for its name and filter, and what differs; problems are noted."""
    return _Feed(stream, problems).read()


class _Feed:
    def __init__(self, stream: Given, problems: Problems) -> None:
        self._stream, self._problems = stream, problems
        self._entries = Entries()
        self._notes: list[Note] = []

    def read(self) -> tuple[Entries, list[Note]]:
        self._entries.append(YamlEntry("stream", self._stream.text("stream"), self._stream.at("stream")))
        self._leave_out()
        self._start()
        self._duration("max_age")
        if mode := self._mode():
            self._sampling(mode)
        else:
            self._unsampled()
        return self._entries, self._notes

    def _note(self, key: str, text: str) -> None:
        self._notes.append(Note(self._stream.place(key), self._stream.at(key), text))

    def _problem(self, key: str, text: str) -> None:
        self._problems.add(self._stream.at(key), (self._stream.place(key),), text)

    def _put(self, key: str, value: object) -> None:
        self._entries.append(YamlEntry(key, value, self._stream.at(key)))

    def _duration(self, key: str) -> None:
        text = self._stream.text(key)
        try:
            value = convert(text)
        except ValueError as error:
            self._problem(key, str(error))
            return
        if value != "0s":
            self._put(key, value)

    def _leave_out(self) -> None:
        for key, why in LEFT_OUT.items():
            if self._stream.has(key):
                self._note(key, why)

    # Where it begins

    def _start(self) -> None:
        found = [key for key in _STARTS if self._is_set(key)]
        for key in found[1:]:
            self._note(key, f"stream-replicator goes by {found[0]} where both are set, and so does this file")
        if found and found[0] == "start_delta":
            self._duration("start_delta")
        elif found:
            self._put(found[0], self._stream.get(found[0]))

    def _is_set(self, key: str) -> bool:
        return bool(self._stream.get(key)) and self._stream.get(key) != _ZERO_TIME

    # Sampling

    def _mode(self) -> str:
        """The key to sample by; empty where nothing is sampled."""
        found = [key for key in _MODES if self._stream.get(key)]
        if len(found) > 1:
            self._problem(found[1], f"expected at most one key to sample by, found {' and '.join(found)}")
        if found and not self._has_period():
            self._note(
                found[0], "without inspect_duration stream-replicator copies every message; so does this feed"
            )
            return ""
        return found[0] if found else ""

    def _has_period(self) -> bool:
        try:
            return convert(self._stream.text("inspect_duration")) != "0s"
        except ValueError:
            return True  # the problem is noted where the key is read

    def _sampling(self, mode: str) -> None:
        if mode != "inspect_field":
            self._note(
                mode,
                "stream-replicator never sampled by this key (a defect) and copied everything; Floe samples",
            )
        self._put(mode, self._stream.get(mode))
        self._force()
        self._duration("inspect_duration")
        self._duration("warn_duration")
        if size := math.ceil(self._stream.get("size_trigger", 0)):
            self._put("size_trigger", str(size))
        self._advisory()

    def _force(self) -> None:
        if field := self._stream.text("inspect_force_field"):
            why = "stream-replicator forced a copy where the field was there at all, Floe where it is true"
            self._note("inspect_force_field", why)
            self._put("inspect_force_field", field)

    def _advisory(self) -> None:
        given: Given | None = self._stream.get("advisory")
        if given is None or not given.text("subject"):
            return
        entries = Entries([YamlEntry("subject", given.text("subject"), given.at("subject"))])
        if given.has("reliable"):
            entries.append(YamlEntry("reliable", given.get("reliable"), given.at("reliable")))
        self._put("advisory", entries)

    def _unsampled(self) -> None:
        without = ("inspect_force_field", "inspect_duration", "warn_duration", "size_trigger", "advisory")
        for key in self._given(without):
            self._note(key, "without sampling it has no effect, in stream-replicator as in Floe")

    def _given(self, keys: tuple[str, ...]) -> Iterator[str]:
        return (key for key in keys if self._stream.get(key))


#: Who publishes them (None: no site does), the section `heartbeats`, and what differs.
Beats = tuple[Site | None, Entries, list[Note]]

_SECRET = re.compile(r"auth|token|secret|passw|credential|cookie|api-?key", re.IGNORECASE)
_LEFT_OUT = {
    "leader_election": "one of all instances publishes them, without a key",
    "choria": "Choria's login is not carried over; heartbeats go through the connection of egress",
    "tls": "heartbeats go through the connection of egress",
}


def heartbeats(given: Given | None, sites: Sequence[Site], problems: Problems) -> Beats:
    """The heartbeats of the section `given`; nothing where there is none."""
    if given is None:
        return None, Entries(), []
    notes = [Note(given.place(key), given.at(key), why) for key, why in _LEFT_OUT.items() if given.has(key)]
    subjects: tuple[Given, ...] = given.get("subjects", ())
    if not sites or not subjects:
        what = "subjects" if sites else "streams"
        return None, Entries(), [*notes, Note(given.path, given.mark, f"left out: there are no {what}")]
    site = _site(given, sites, problems, notes)
    entries = Entries(_interval(given, problems))
    if headers := _headers(given, subjects, notes):
        entries.append(YamlEntry("headers", headers, given.at("headers")))
    items = [Entries([_subject(subject), *_interval(subject, problems)]) for subject in subjects]
    entries.append(YamlEntry("subjects", items, given.at("subjects")))
    return site, entries, notes


def _site(given: Given, sites: Sequence[Site], problems: Problems, notes: list[Note]) -> Site:
    place, mark = given.place("url"), given.at("url")
    found = read_url(given.text("url"), {}, lambda text: problems.add(mark, (place,), text))
    servers = set(found[0].servers) if found else set()
    for site in sites:
        if servers & set(site.connection.servers):
            return site
    notes.append(Note(place, mark, f"heartbeats go where egress reads, here {sites[0].connection.host}"))
    return sites[0]


def _subject(given: Given) -> YamlEntry:
    return YamlEntry("subject", given.text("subject"), given.at("subject"))


def _interval(given: Given, problems: Problems) -> list[YamlEntry]:
    try:
        interval = convert(given.text("interval"))
    except ValueError as error:
        problems.add(given.at("interval"), (given.place("interval"),), str(error))
        return []
    return [] if interval == "0s" else [YamlEntry("interval", interval, given.at("interval"))]


def _headers(given: Given, subjects: tuple[Given, ...], notes: list[Note]) -> Entries:
    """The headers of every message: those of all subjects together, where they are the same for each."""
    common: Mapping[str, str] = given.get("headers", {})
    wanted = [{**common, **subject.get("headers", {})} for subject in subjects]
    if all(headers == wanted[0] for headers in wanted):
        common = wanted[0]
    else:
        why = "headers are the same for all subjects in Floe; those of this one are left out"
        notes += [Note(s.place("headers"), s.at("headers"), why) for s in subjects if s.has("headers")]
    return Entries(YamlEntry(name, _hidden(name, text), given.at("headers")) for name, text in common.items())


def _hidden(name: str, text: str) -> str:
    if not _SECRET.search(name):
        return text
    return Variable(f"${{FLOE_HEARTBEAT_{re.sub('[^A-Z0-9]', '_', name.upper())}}}")
