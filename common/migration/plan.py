"""Plan of an import: the sites, feeds, centres, targets and heartbeats that the entries of `streams` become. Pure.

An entry of stream-replicator is a path from one stream to another. In Floe the way to the bucket (a feed) and the way
from it (a source of a target) are separate, so one feed may serve several targets, and entries that are partitions of
one stream become partitions of one feed.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.migration.read import FileKeys, Keys, Note, ReplicatorConnection, Variable, convert_duration, read_url
from common.settings.types import MAX_SIZE_BYTES
from common.subjects import first_overlap


@dataclass(slots=True)
class ImportedStream:
    """One entry: from a stream at `source` to a stream at `target`. `feed`: the keys of its feed."""

    given: FileKeys
    source: ReplicatorConnection
    target: ReplicatorConnection
    feed: Keys
    notes: list[Note]
    target_notes: list[Note]

    @property
    def stream(self) -> str:
        return self.given.text("stream")

    @property
    def filter(self) -> str:
        """The filter subject; empty for the whole stream, also for `>`."""
        text = self.given.text("filter_subject")
        return "" if text == ">" else text

    @property
    def target_stream(self) -> str:
        return self.given.text("target_stream") or self.stream

    @property
    def feed_settings(self) -> str:
        """The feed settings, apart from filters: equal for entries that want the same ones."""
        return str(self.feed)

    @property
    def target_route(self) -> tuple[object, str, str, str]:
        """The target and the changes of subjects: equal for entries that lead to the same place in the same way."""
        prefix, removed = (self.given.text(f"target_subject_{key}") for key in ("prefix", "remove"))
        return self.target.identity, self.target_stream, prefix, removed


@dataclass(slots=True)
class PlannedFeed:
    """A feed of a site: its `paths` want the same settings and lead to different targets, or are its partitions.

    `filters`: those of the partitions, in order.
    """

    name: str
    paths: list[ImportedStream]
    filters: tuple[str, ...]

    @property
    def routes(self) -> list[ImportedStream]:
        return list({path.target_route: path for path in reversed(self.paths)}.values())[::-1]


@dataclass(slots=True)
class PlannedSite:
    name: str
    connection: ReplicatorConnection
    feeds: list[PlannedFeed] = field(default_factory=list)


#: A site and a feed that flow into a target, with the path that determines how.
PlannedSource = tuple[PlannedSite, PlannedFeed, ImportedStream]


@dataclass(slots=True)
class PlannedCentre:
    """The targets at one place: the sources of each target stream."""

    connection: ReplicatorConnection
    targets: dict[str, list[PlannedSource]] = field(default_factory=dict)


def plan(name: str, paths: Sequence[ImportedStream]) -> tuple[list[PlannedSite], list[PlannedCentre]]:
    by_source: dict[object, list[ImportedStream]] = defaultdict(list)
    for path in paths:
        by_source[path.source.identity].append(path)
    sites = []
    for number, group in enumerate(by_source.values(), 1):
        tail = f"-{number}" if number > 1 else ""
        sites.append(PlannedSite(name[: 63 - len(tail)] + tail, group[0].source, _feeds(group)))
    return sites, _centres(sites)


def _feeds(paths: Sequence[ImportedStream]) -> list[PlannedFeed]:
    feeds: list[PlannedFeed] = []
    for group, filters in _group_paths(paths):
        shared = next((feed for feed in feeds if _can_share(feed, group, filters)), None)
        if shared is not None:
            shared.paths += group
        else:
            feeds.append(PlannedFeed(_name(group[0], {feed.name for feed in feeds}), group, filters))
    return feeds


def _group_paths(paths: Sequence[ImportedStream]) -> list[tuple[list[ImportedStream], tuple[str, ...]]]:
    groups: dict[object, list[ImportedStream]] = defaultdict(list)
    for path in paths:
        groups[path.feed_settings, path.target_route].append(path)
    found = []
    for group in groups.values():
        filters = tuple(path.filter for path in group)
        if len(group) > 1 and first_overlap(filters) is None:
            found.append((group, filters))
        else:
            found += [([path], (path.filter,)) for path in group]
    return found


def _can_share(feed: PlannedFeed, group: Sequence[ImportedStream], filters: tuple[str, ...]) -> bool:
    taken, first = {path.target_route[:2] for path in feed.paths}, group[0]
    has_same_settings = feed.filters == filters and feed.paths[0].feed_settings == first.feed_settings
    return has_same_settings and first.target_route[:2] not in taken


def _name(path: ImportedStream, taken: set[str]) -> str:
    own = path.given.text("name").strip()
    wanted = [path.stream, *([f"{path.stream}_{own}"] if own else [])]
    numbered = (f"{path.stream}_{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (*wanted, *numbered) if name not in taken)


def _centres(sites: Sequence[PlannedSite]) -> list[PlannedCentre]:
    centres: dict[object, PlannedCentre] = {}
    for site, feed in ((each, feed) for each in sites for feed in each.feeds):
        for path in feed.routes:
            centre = centres.setdefault(path.target.identity, PlannedCentre(path.target))
            centre.targets.setdefault(path.target_stream, []).append((site, feed, path))
    return list(centres.values())


_IN_ORDER = "a feed is read in order by one reader; partitions divide it where a reader is too slow"

#: Keys of an entry without a counterpart, and why.
STREAM_KEYS_LEFT_OUT = {
    "ephemeral": "a start copies nothing again: Floe continues at its position",
    "target_initiated": "Floe always runs at both ends: egress at the source, ingress at the target",
    "leader_election_name": "several instances share the work by leases, without a key; see lease_ttl",
    # Those before 0.5, as `as_streams` names them.
    "workers": _IN_ORDER,
    "queued": _IN_ORDER,
    "queue_group": _IN_ORDER,
    "source_cluster_id": "the name of the site; JetStream has no cluster id to connect with",
    "target_cluster_id": "JetStream has no cluster id to connect with",
    "durable_name": "egress knows its position from the bucket, without a named subscription",
    "topic_monitor": "one process has all feeds: the port of the first topic is egress.monitor.listen",
    "tls_identity": "only with scheme: puppet; otherwise ca, cert and key name the files",
    "advisory_cluster": "advisories are published at the site; carry them to the centre as a feed of their own",
}

_STARTS = ("start_at_end", "start_sequence", "start_delta", "start_time")  # the first that is set counts
_MODES = ("inspect_field", "inspect_header", "inspect_subject_token")
_ZERO_TIME = "0001-01-01T00:00:00Z"


def feed_of(stream: FileKeys) -> tuple[Keys, list[Note]]:
    """Return the keys of the feed except name and filter, and notes about differences; problems are noted."""
    notes = stream.notes_for(STREAM_KEYS_LEFT_OUT)
    if stream.paths and stream.text("stream"):
        reason = f"NATS Streaming is not read: {stream.text('stream')} is the JetStream stream with this subject"
        notes.append(stream.note("stream", f"{reason}; create it, or set the name of the one that has it"))
    feed = {"stream": stream.text("stream"), **_start(stream, notes), **stream.duration("max_age")}
    if mode := _mode(stream, notes):
        feed |= _sampling(stream, mode, notes)
    else:
        without = ("inspect_force_field", "inspect_duration", "warn_duration", "size_trigger", "advisory")
        reason = "without sampling it has no effect, in stream-replicator as in Floe"
        notes += [stream.note(key, reason) for key in without if stream.get(key)]
    return feed, notes


def _start(stream: FileKeys, notes: list[Note]) -> Keys:
    found = [key for key in _STARTS if stream.get(key) and stream.get(key) != _ZERO_TIME]
    for key in found[1:]:
        reason = f"stream-replicator uses {found[0]} if both are set, and so does this file"
        notes.append(stream.note(key, reason))
    return (
        stream.duration("start_delta") if found[:1] == ["start_delta"] else {key: stream.get(key) for key in found[:1]}
    )


def _mode(stream: FileKeys, notes: list[Note]) -> str:
    """Return the key by which the feed samples; empty if nothing is sampled."""
    found = [key for key in _MODES if stream.get(key)]
    if len(found) > 1:
        stream.add_problem(found[1], f"expected at most one key to sample by, found {' and '.join(found)}")
    if not found or _has_period(stream):
        return found[0] if found else ""
    reason = "without inspect_duration stream-replicator copies every message; so does this feed"
    notes.append(stream.note(found[0], reason))
    return ""


def _has_period(stream: FileKeys) -> bool:
    try:
        return convert_duration(stream.text("inspect_duration")) != "0s"
    except ValueError:
        return True  # reading the key notes the problem


def _sampling(stream: FileKeys, mode: str, notes: list[Note]) -> Keys:
    if mode != "inspect_field":
        reason = "stream-replicator never sampled by this key (a defect) and copied everything; Floe samples"
        notes.append(stream.note(mode, reason))
    feed = {mode: stream.get(mode)}
    if stream.text("inspect_force_field"):
        reason = "stream-replicator forced a copy if the field was present, Floe if it is true"
        notes += [] if stream.paths else [stream.note("inspect_force_field", reason)]
        feed["inspect_force_field"] = stream.get("inspect_force_field")
    feed |= stream.duration("inspect_duration") | stream.duration("warn_duration")
    if size := math.ceil(min(stream.get("size_trigger", 0), MAX_SIZE_BYTES)):
        feed["size_trigger"] = str(size)
    advisory: FileKeys | None = stream.get("advisory")
    if advisory is not None and advisory.text("subject"):
        feed["advisory"] = {key: advisory.get(key) for key in ("subject", "reliable") if advisory.has(key)}
    return feed


#: The site that publishes them (None: no site does), the section `heartbeats`, and the differences.
PlannedHeartbeats = tuple[PlannedSite | None, Keys, list[Note]]

_SECRET = re.compile(r"auth|token|secret|passw|credential|cookie|api-?key", re.IGNORECASE)
HEARTBEAT_KEYS_LEFT_OUT = {
    "leader_election": "one of the instances publishes them, without a key for it",
    "choria": "Choria's login is not imported; heartbeats use the connection of egress",
    "tls": "heartbeats use the connection of egress",
}


def heartbeats(given: FileKeys | None, sites: Sequence[PlannedSite]) -> PlannedHeartbeats:
    """Return the heartbeats of the section `given`; empty if there is no such section."""
    if given is None:
        return None, {}, []
    notes = given.notes_for(HEARTBEAT_KEYS_LEFT_OUT)
    subjects: tuple[FileKeys, ...] = given.get("subjects", ())
    if not sites or not subjects:
        missing = "subjects" if sites else "streams"
        return None, {}, [*notes, Note(given.path, given.mark, f"left out: there are no {missing}")]
    site, found = _site(given, sites, notes), given.duration("interval")
    if headers := _headers(given, subjects, notes):
        found["headers"] = headers
    found["subjects"] = [{"subject": each.text("subject"), **each.duration("interval")} for each in subjects]
    return site, found, notes


def _site(given: FileKeys, sites: Sequence[PlannedSite], notes: list[Note]) -> PlannedSite:
    found, _ = read_url(given, "url", {})
    own = next((site for site in sites if found and {*found.servers} & {*site.connection.servers}), None)
    if own is None:
        notes.append(given.note("url", f"heartbeats go to egress' server, here {sites[0].connection.servers[0]}"))
    return own or sites[0]


def _headers(given: FileKeys, subjects: tuple[FileKeys, ...], notes: list[Note]) -> Keys:
    common: Mapping[str, str] = given.get("headers", {})
    wanted = [{**common, **subject.get("headers", {})} for subject in subjects]
    if all(headers == wanted[0] for headers in wanted):
        common = wanted[0]
    else:
        reason = "headers are the same for all subjects in Floe; those of this one are left out"
        notes += [subject.note("headers", reason) for subject in subjects if subject.has("headers")]
    return {name: _hide_secret(name, text) for name, text in common.items()}


def _hide_secret(name: str, text: str) -> str:
    variable = Variable(f"${{FLOE_HEARTBEAT_{re.sub('[^A-Z0-9]', '_', name.upper())}}}")
    return variable if _SECRET.search(name) else text
