"""A plan as configuration files: one for each site, one for each centre."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.migration.entries import Entries, Variable, YamlEntry, comment, origins, render
from common.migration.plan import (
    Beats,
    Centre,
    MigrationPlan,
    Path,
    PlannedFeed,
    PlannedTarget,
    Site,
    feed_of,
    heartbeats,
    plan,
    within,
)
from common.migration.read import Given, Note, connection, read
from common.settings.loader import parse_documents
from common.settings.yaml import ConfigFileError, Mark, Problem, Problems, parse_yaml, read_text, refuse
from common.subjects import first_overlap, overlaps

_VARIABLE = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning"}

#: Keys of the file as a whole without a counterpart, and why.
LEFT_OUT = {
    "state_store": "samplers keep their state in the bucket (snapshot_interval); nothing stays on the host",
    "logfile": "the log goes to stderr; the supervisor keeps it",
    "profiling": "there is no profiler on the monitor; py-spy looks into a running process",
}

_NO_CREATE = "without `create`, as here, Floe stops with the `nats stream add` of the target to paste"
_SITE_HEAD = "the site: floe egress run -c {name}"
_CENTRE_HEAD = "the centre: floe ingress run -c {name}; cron: floe compact -c {name}"


@dataclass(frozen=True, slots=True)
class File:
    """A configuration file to write. `site`: empty for a centre; `variables`: what its `${…}` need."""

    name: str
    site: str
    text: str
    notes: tuple[Note, ...]
    origins: dict[str, Mark]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_VARIABLE.findall(self.text)))


def files(top: Given, found: MigrationPlan, beats: Beats, came_from: str) -> list[File]:
    """The files, in the order of the plan; `came_from`: the imported file, for the first line of each."""
    sites = [_SiteFile(top, site, beats, len(found.sites) > 1).file(came_from) for site in found.sites]
    centres = [_centre_file(top, c, number, came_from) for number, c in enumerate(found.centres, 1)]
    return [*sites, *centres]


def bare_site(top: Given, name: str, came_from: str, notes: list[Note]) -> File:
    """The file of a site without streams."""
    entries = Entries([YamlEntry("site", name, top.at("name")), _store(), *_log(top, notes)])
    return _file("site.yaml", name, entries, [*_left_out(top), *notes], came_from, _SITE_HEAD)


def _file(name: str, site: str, entries: Entries, notes: Sequence[Note], came_from: str, head: str) -> File:
    general = [note for note in notes if not note.path.startswith("streams.")]
    lines = [f"{name}, made from {came_from} by floe config import-stream-replicator", head.format(name=name)]
    if general:
        lines += ["", "not carried over, or otherwise than there:", *(f" {note}" for note in general)]
    text = "".join(f"{line}\n" for line in comment(lines)) + render(entries)
    return File(name, site, text, tuple(notes), origins(entries))


def _left_out(top: Given) -> list[Note]:
    return [Note(key, top.at(key), why) for key, why in LEFT_OUT.items() if top.has(key)]


def _store() -> YamlEntry:
    keys = (
        ("url", "s3://${FLOE_BUCKET}"),
        ("endpoint_url", "${FLOE_S3_ENDPOINT:-}"),
        ("access_key_id", "${FLOE_S3_KEY}"),
        ("secret_access_key", "${FLOE_S3_SECRET}"),
    )
    notes = ["the bucket between site and centre: set the variables, or write the values here;"]
    notes += ["FLOE_S3_ENDPOINT only where the store is not Amazon's"]
    return YamlEntry("store", Entries(YamlEntry(key, Variable(value)) for key, value in keys), notes=notes)


def _log(top: Given, notes: list[Note]) -> list[YamlEntry]:
    level = top.text("loglevel")
    if not level:
        return []
    if level not in _LEVELS:
        why = (
            f"expected debug, info or warn; stream-replicator takes {level!r:.40} for info, and so does this"
        )
        notes.append(Note("loglevel", top.at("loglevel"), why))
    return [YamlEntry("log", Entries([YamlEntry("level", _LEVELS.get(level, "info"))]), top.at("loglevel"))]


def _lines(notes: Iterable[Note]) -> list[str]:
    return [str(note) for note in notes if note.path.startswith("streams.")]


class _SiteFile:
    def __init__(self, top: Given, site: Site, beats: Beats, is_one_of_many: bool) -> None:
        self._top, self._site, self._several = top, site, is_one_of_many
        self._beats = beats[1] if beats[0] is site else Entries()
        self._notes = _left_out(top) + (beats[2] if beats[0] in (site, None) else [])

    def file(self, came_from: str) -> File:
        log = _log(self._top, self._notes)
        egress = Entries(
            [*self._monitor(), YamlEntry("feeds", [self._feed(feed) for feed in self._site.feeds])]
        )
        if self._beats:
            egress.append(YamlEntry("heartbeats", self._beats))
        mark = self._site.feeds[0].paths[0].given.at("source_url")
        nats = YamlEntry("nats", self._site.connection.entries("source", mark), mark)
        entries = Entries([self._name(), nats, _store(), *log, YamlEntry("egress", egress)])
        name = f"site-{self._site.name}.yaml" if self._several else "site.yaml"
        return _file(name, self._site.name, entries, _unique(self._notes), came_from, _SITE_HEAD)

    def _name(self) -> YamlEntry:
        notes = []
        if self._several:
            notes.append(f"the site of {self._site.connection.host}; unique over all sites of the bucket")
        if self._site.name != self._top.text("name"):
            notes.append("other than there: choose a name, and the same in the centre's sources")
        return YamlEntry("site", self._site.name, self._top.at("name"), notes)

    def _monitor(self) -> list[YamlEntry]:
        if not self._top.has("monitor_port"):
            return []
        port, mark = self._top.get("monitor_port"), self._top.at("monitor_port")
        listen = YamlEntry("listen", f":{port}" if port else "", mark)
        notes = ["ingress has a port of its own: ingress.monitor.listen, 127.0.0.1:9465 unless set"]
        return [YamlEntry("monitor", Entries([listen]), mark, notes)]

    def _feed(self, feed: PlannedFeed) -> Entries:
        first = feed.paths[0]
        notes = _unique(note for path in feed.paths for note in path.notes)
        self._notes += notes
        own = [] if feed.name == first.stream else [YamlEntry("name", feed.name, first.given.at("name"))]
        mark = first.given.at("filter_subject")
        if len(feed.filters) > 1:
            own_filter = [YamlEntry("partitions", list(feed.filters), mark)]
        else:
            own_filter = [YamlEntry("filter_subject", each, mark) for each in feed.filters if each]
        return Entries([*own, *first.feed, *own_filter], _lines(notes))


def _unique(notes: Iterable[Note]) -> list[Note]:
    return list(dict.fromkeys(notes))


def _centre_file(top: Given, centre: Centre, number: int, came_from: str) -> File:
    notes: list[Note] = []
    created = _created(centre)
    targets = [_target(target, created.get(target.stream, []), notes) for target in centre.targets]
    path = centre.targets[0].sources[0][2]
    mark = path.given.at("target_url")
    nats = YamlEntry("nats", centre.connection.entries("target", mark), mark)
    new = "new and empty streams that only Floe writes to; docs/migration.md says how to change over"
    ingress = Entries([YamlEntry("targets", targets, notes=[new])])
    entries = Entries([nats, _store(), *_log(top, []), YamlEntry("ingress", ingress)])
    name = "central.yaml" if number == 1 else f"central-{number}.yaml"
    return _file(name, "", entries, _unique(notes), came_from, _CENTRE_HEAD)


def _created(centre: Centre) -> dict[str, list[str]]:
    """The subjects of the targets that are to be created, by stream: none takes those of another."""
    found = {target.stream: _subjects(target) for target in centre.targets if _is_created(target)}
    return {
        stream: subjects
        for stream, subjects in found.items()
        if not any(
            overlaps(one, other)
            for others in (found[each] for each in found if each != stream)
            for one in subjects
            for other in others
        )
    }


def _is_created(target: PlannedTarget) -> bool:
    return not any(path.given.get("no_target_create") for _, _, path in target.sources)


def _target(target: PlannedTarget, created: list[str], notes: list[Note]) -> Entries:
    path = target.sources[0][2]
    key = "target_stream" if path.given.has("target_stream") else "stream"
    entries = Entries([YamlEntry("stream", target.stream, path.given.at(key))])
    entries += _create(created)
    sources = [_source(*source, notes) for source in target.sources]
    entries.append(YamlEntry("sources", sources, notes=() if len(entries) > 1 else [_NO_CREATE]))
    return entries


def _source(site: Site, feed: PlannedFeed, path: Path, notes: list[Note]) -> Entries:
    own = _unique(note for each in feed.paths if each.route == path.route for note in each.target_notes)
    notes += own
    entries = Entries(
        [YamlEntry("site", site.name), YamlEntry("feed", feed.name, path.given.at("name"))], _lines(own)
    )
    for key in ("subject_prefix", "subject_remove"):
        if text := path.given.text(f"target_{key}"):
            entries.append(YamlEntry(key, text, path.given.at(f"target_{key}")))
    return entries


def _create(subjects: list[str]) -> list[YamlEntry]:
    """The key `create`; none where the subjects of the target are not known, or it is not to be created."""
    if not subjects:
        return []
    keys = [YamlEntry("replicas", 1), YamlEntry("storage", "file"), YamlEntry("subjects", subjects)]
    notes = ["stream-replicator gave it the limits of the source: set replicas, max_age and max_bytes"]
    return [YamlEntry("create", Entries(keys), notes=notes)]


def _subjects(target: PlannedTarget) -> list[str]:
    """What the messages of all sources are published to; empty where it cannot be told."""
    found = [subject for _, feed, path in target.sources for subject in _mapped(feed, path)]
    if "" in found:
        return []
    unique = list(dict.fromkeys(found))
    kept = [one for one in unique if not any(one != other and within(one, other) for other in unique)]
    return [] if first_overlap(kept) else kept


def _mapped(feed: PlannedFeed, path: Path) -> list[str]:
    """The subjects of one source at the target; an empty one where it cannot be told."""
    prefix = path.given.text("target_subject_prefix").rstrip(".")
    removed = path.given.text("target_subject_remove")
    if not removed:
        return [f"{prefix}.{each or '>'}" if prefix else each for each in feed.filters]
    begin = f"{prefix}."
    reaches_in = removed in begin or any(removed.startswith(begin[n:]) for n in range(len(begin)))
    return [""] if not prefix or reaches_in else [f"{prefix}.>"]


@dataclass(frozen=True, slots=True)
class Imported:
    """The files that one becomes, each a configuration that `floe config check` takes."""

    files: tuple[File, ...]

    @property
    def notes(self) -> list[Note]:
        """What is not carried over, or otherwise, once each, in the order of the file."""
        found = dict.fromkeys(note for file in self.files for note in file.notes)
        return sorted(found, key=lambda note: note.mark)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the environment that the files need."""
        return tuple(dict.fromkeys(name for file in self.files for name in file.variables))


def import_stream_replicator(data: bytes, name: str) -> Imported:
    """What the file with the content `data`, called `name` in messages, becomes.

    Raises ConfigFileError with a line for each problem, placed in that file; never with a secret. Nothing
    that the file names is opened, and no variable of the environment is read.
    """
    top = _read(data, name)
    problems = Problems(name)
    paths = [path for stream in top.get("streams", ()) if (path := _path(stream, top, problems)) is not None]
    if not top.text("name"):
        problems.add(top.at("name"), ("name",), "expected a value (required), found nothing")
    found = plan(site_name(top.text("name")), paths)
    beats = heartbeats(top.get("heartbeats"), found.sites, problems)
    refuse(problems)
    made = files(top, found, beats, name) or [bare_site(top, site_name(top.text("name")), name, beats[2])]
    _check(made, top, name)
    return Imported(tuple(made))


def site_name(text: str) -> str:
    """The name as a site may have it: other characters as `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text).lstrip("_-")[:63] or "site"


def _read(data: bytes, name: str) -> Given:
    problems = Problems(name)
    text = read_text(data, problems)
    refuse(problems)
    roots = parse_yaml(text, problems)
    refuse(problems)
    if len(roots) != 1:
        problems.add(roots[1].mark, (), f"expected one document, found {len(roots)}")
        refuse(problems)
    top = read(roots[0], problems)
    refuse(problems)
    return top


def _path(stream: Given, top: Given, problems: Problems) -> Path | None:
    if not stream.text("stream"):
        problems.add(
            stream.at("stream"), (stream.place("stream"),), "expected a value (required), found nothing"
        )
    feed, notes = feed_of(stream, problems)
    source, source_notes = connection(stream, top, "source", problems)
    target, target_notes = connection(stream, top, "target", problems)
    if source is None or target is None:
        return None
    if stream.get("no_target_create"):
        why = "the target is not created: without `create` Floe stops with the `nats stream add` to paste"
        target_notes.append(Note(stream.place("no_target_create"), stream.at("no_target_create"), why))
    return Path(stream, source, target, feed, [*source_notes, *notes], target_notes)


# What Floe says of the result, told of the file that it was made from


def _check(made: Iterable[File], top: Given, name: str) -> None:
    places = dict(_places(top))
    found: list[Problem] = []
    for file in made:
        environment = dict.fromkeys(file.variables, "value")
        try:
            parse_documents(file.text.encode(), file.name, environment)
        except ConfigFileError as error:
            found += [_moved(problem, file, places, name) for problem in error.found]
    if found:
        raise ConfigFileError(dict.fromkeys(found))


def _moved(problem: Problem, file: File, places: dict[Mark, str], name: str) -> Problem:
    parts = problem.path.split(".")
    tried = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    mark = next((file.origins[path] for path in tried if path in file.origins), Mark(0, 0))
    return Problem(
        name, *mark, places.get(mark, problem.path), f"{problem.message} ({file.name}: {problem.path})"
    )


def _places(given: Given) -> Iterable[tuple[Mark, str]]:
    for key, value in given.values.items():
        yield given.at(key), given.place(key)
        for below in value if isinstance(value, tuple) else (value,):
            if isinstance(below, Given):
                yield from _places(below)
