"""Import of a configuration: a plan becomes files, one for each site and centre, checked as Floe reads them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.migration import plan
from common.migration.entries import Entries, Variable, YamlEntry, comment, origins, render
from common.migration.read import FILE, TOPICS_FILE, FileKeys, Note, as_streams, read, read_connection
from common.settings.loader import parse_documents
from common.settings.yaml import ConfigFileError, Mark, Problem, Problems, parse_yaml, raise_problems
from common.subjects import covers, first_overlap, overlaps

_VARIABLE = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OF_STREAMS = ("streams.", "topics.")  # beginnings of the paths of keys of one entry
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning"}

#: Keys of the file as a whole without a counterpart, and why.
FILE_KEYS_LEFT_OUT = {
    "state_store": "samplers keep state in the bucket (snapshot_interval), none on the host",
    "logfile": "the log goes to stderr; the supervisor keeps it",
    "profiling": "the monitor has no profiler; use py-spy on the running process",
}

_NO_CREATE = "without `create`, as here, Floe stops and prints the `nats stream add` of the target"
_SITE_HEAD = "the site: floe egress run -c {name}"
_CENTRE_HEAD = "the centre: floe ingress run -c {name}; cron: floe compact -c {name}"


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A configuration file to write. `site`: empty for a centre; `variables`: those that its `${…}` need."""

    name: str
    site: str
    text: str
    notes: tuple[Note, ...]
    origins: dict[str, Mark]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_VARIABLE.findall(self.text)))


def _file(name: str, site: str, entries: Entries, notes: Iterable[Note], source: str) -> ImportedFile:
    unique = tuple(dict.fromkeys(notes))
    head = (_SITE_HEAD if site else _CENTRE_HEAD).format(name=name)
    lines = [f"{name}, made from {source} by floe config import-stream-replicator", head]
    if general := [f" {note}" for note in unique if not note.path.startswith(_OF_STREAMS)]:
        lines += ["", "not imported, or changed:", *general]
    text = "".join(f"{line}\n" for line in comment(lines)) + render(entries)
    return ImportedFile(name, site, text, unique, origins(entries))


def _store() -> YamlEntry:
    keys = (
        ("url", "s3://${FLOE_BUCKET}"),
        ("endpoint_url", "${FLOE_S3_ENDPOINT:-}"),
        ("access_key_id", "${FLOE_S3_KEY}"),
        ("secret_access_key", "${FLOE_S3_SECRET}"),
    )
    notes = ["the bucket between site and centre: set the variables, or write the values here;"]
    notes += ["FLOE_S3_ENDPOINT only if the store is not Amazon's"]
    return YamlEntry("store", Entries(YamlEntry(key, Variable(value)) for key, value in keys), notes=notes)


def _log(top: FileKeys, notes: list[Note]) -> list[YamlEntry]:
    if not (level := top.text("loglevel")):
        return []
    if level not in _LEVELS:
        found = f"stream-replicator reads {level!r:.40} as info, and so does this file"
        notes.append(top.note("loglevel", f"expected debug, info or warn; {found}"))
    return [top.entry("log", Entries([YamlEntry("level", _LEVELS.get(level, "info"))]))]


def _lines(notes: Iterable[Note]) -> list[str]:
    return [str(note) for note in dict.fromkeys(notes) if note.path.startswith(_OF_STREAMS)]


def _site_file(
    top: FileKeys, site: plan.PlannedSite, heartbeats: plan.PlannedHeartbeats, is_one_of_many: bool, source: str
) -> ImportedFile:
    notes = top.notes_for(FILE_KEYS_LEFT_OUT) + (heartbeats[2] if heartbeats[0] in (site, None) else [])
    log = _log(top, notes)
    egress = Entries([*_monitor(top), YamlEntry("feeds", [_feed(feed, notes) for feed in site.feeds])])
    if heartbeats[0] is site and heartbeats[1]:
        egress.append(YamlEntry("heartbeats", heartbeats[1]))
    remarks = []
    if is_one_of_many:
        remarks.append(f"the site of {site.connection.host}; unique over all sites of the bucket")
    if site.name != top.text("name"):
        remarks.append("changed: choose a name, and use it in the centre's sources too")
    own = YamlEntry("site", site.name, top.mark_of("name"), remarks)
    nats = site.connection.entry("source", site.feeds[0].paths[0].given)
    name = f"site-{site.name}.yaml" if is_one_of_many else "site.yaml"
    entries = Entries([own, nats, _store(), *log, YamlEntry("egress", egress)])
    return _file(name, site.name, entries, notes, source)


def _monitor(top: FileKeys) -> list[YamlEntry]:
    if not top.has("monitor_port"):
        return []
    port, mark = top.get("monitor_port"), top.mark_of("monitor_port")
    listen = YamlEntry("listen", f":{port}" if port else "", mark)
    notes = ["ingress has its own port: ingress.monitor.listen, default 127.0.0.1:9465"]
    return [YamlEntry("monitor", Entries([listen]), mark, notes)]


def _feed(feed: plan.PlannedFeed, notes: list[Note]) -> Entries:
    first = feed.paths[0]
    found = [note for path in feed.paths for note in path.notes]
    notes += found
    own = [] if feed.name == first.stream else [first.given.entry("name", feed.name)]
    mark = first.given.mark_of("filter_subject")
    if len(feed.filters) > 1:
        filters = [YamlEntry("partitions", list(feed.filters), mark)]
    else:
        filters = [YamlEntry("filter_subject", each, mark) for each in feed.filters if each]
    return Entries([*own, *first.feed, *filters], _lines(found))


def _centre_file(top: FileKeys, centre: plan.PlannedCentre, number: int, source: str) -> ImportedFile:
    notes: list[Note] = []
    created = _subjects_to_create(centre)
    targets = [_target(stream, sources, created.get(stream, []), notes) for stream, sources in centre.targets.items()]
    nats = centre.connection.entry("target", next(iter(centre.targets.values()))[0][2].given)
    new = "new and empty streams that only Floe writes to; docs/guides/migrate.md describes the change-over"
    ingress = Entries([YamlEntry("targets", targets, notes=[new])])
    entries = Entries([nats, _store(), *_log(top, []), YamlEntry("ingress", ingress)])
    return _file("central.yaml" if number == 1 else f"central-{number}.yaml", "", entries, notes, source)


def _subjects_to_create(centre: plan.PlannedCentre) -> dict[str, list[str]]:
    """Return the subjects of the targets that are to be created, by stream: no target takes the subjects of another."""
    found = {
        stream: _subjects(sources)
        for stream, sources in centre.targets.items()
        if not any(path.given.get("no_target_create") for _, _, path in sources)
    }
    all_of = [(stream, subject) for stream, subjects in found.items() for subject in subjects]
    taken = {name for name, mine in all_of for other, theirs in all_of if name != other and overlaps(mine, theirs)}
    return {stream: subjects for stream, subjects in found.items() if stream not in taken}


def _target(stream: str, sources: Sequence[plan.PlannedSource], subjects: list[str], notes: list[Note]) -> Entries:
    given = sources[0][2].given
    mark = given.mark_of("target_stream" if given.has("target_stream") else "stream")
    entries = Entries([YamlEntry("stream", stream, mark)])
    if subjects:
        keys = [YamlEntry("replicas", 1), YamlEntry("storage", "file"), YamlEntry("subjects", subjects)]
        reason = "stream-replicator gave it the limits of the source: set replicas, max_age and max_bytes"
        entries.append(YamlEntry("create", Entries(keys), notes=[reason]))
    items = [_source(*source, notes) for source in sources]
    entries.append(YamlEntry("sources", items, notes=() if subjects else [_NO_CREATE]))
    return entries


def _source(site: plan.PlannedSite, feed: plan.PlannedFeed, path: plan.ImportedStream, notes: list[Note]) -> Entries:
    own = [note for each in feed.paths if each.target_route == path.target_route for note in each.target_notes]
    notes += own
    feed_entry = YamlEntry("feed", feed.name, path.given.mark_of("name"))
    entries = Entries([YamlEntry("site", site.name), feed_entry], _lines(own))
    for key in ("subject_prefix", "subject_remove"):
        if text := path.given.text(f"target_{key}"):
            entries.append(YamlEntry(key, text, path.given.mark_of(f"target_{key}")))
    return entries


def _subjects(sources: Sequence[plan.PlannedSource]) -> list[str]:
    """Return the subjects of the messages of all sources; empty if they are unknown, or would overlap."""
    found = [subject for _, feed, path in sources for subject in _mapped_subjects(feed, path)]
    if "" in found:
        return []
    unique = list(dict.fromkeys(found))
    kept = [subject for subject in unique if not any(subject != other and covers(other, subject) for other in unique)]
    return [] if first_overlap(kept) else kept


def _mapped_subjects(feed: plan.PlannedFeed, path: plan.ImportedStream) -> list[str]:
    """Return the subjects of one source at the target; one of them is empty if they are unknown."""
    prefix = path.given.text("target_subject_prefix").rstrip(".")
    if not (removed := path.given.text("target_subject_remove")):
        return [f"{prefix}.{each or '>'}" if prefix else each for each in feed.filters]
    begin = f"{prefix}."
    reaches_in = removed in begin or any(removed.startswith(begin[n:]) for n in range(len(begin)))
    return [""] if not prefix or reaches_in else [f"{prefix}.>"]


@dataclass(frozen=True, slots=True)
class Imported:
    """The files that one file becomes, each a configuration that `floe config check` accepts."""

    files: tuple[ImportedFile, ...]

    @property
    def notes(self) -> list[Note]:
        found = dict.fromkeys(note for file in self.files for note in file.notes)
        return sorted(found, key=lambda note: note.mark)

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for file in self.files for name in file.variables))


def import_stream_replicator(data: bytes, name: str) -> Imported:
    """Convert the file with the content `data`; messages call it `name`.

    Raises ConfigFileError with a line for each problem, placed in that file; never with a secret. Opens no file that is
    named in it, and reads no environment variable.
    """
    problems = Problems(name)
    roots = parse_yaml(data, problems)
    raise_problems(problems)
    if len(roots) != 1:
        problems.add(roots[1].mark, (), f"expected one document, found {len(roots)}")
        raise_problems(problems)
    is_old = "topics" in roots[0].entries and "streams" not in roots[0].entries
    top = read(roots[0], problems, TOPICS_FILE if is_old else FILE)
    if is_old and not (problems or top.get("topics")):
        top.add_problem("topics", "expected at least one topic, found none")
    raise_problems(problems)
    top = as_streams(top) if is_old else top
    paths = [path for stream in top.get("streams", ()) if (path := _path(stream, top)) is not None]
    # The name in the form of a site name: other characters become `-`.
    own = re.sub(r"[^A-Za-z0-9_-]", "-", top.text("name")).lstrip("_-")[:63] or "site"
    if not top.text("name"):
        top.add_problem("name", "expected a value (required), found nothing")
    sites, centres = plan.plan(own, paths)
    heartbeats = plan.heartbeats(top.get("heartbeats"), sites)
    raise_problems(top.problems)
    made = [_site_file(top, site, heartbeats, len(sites) > 1, name) for site in sites]
    made += [_centre_file(top, centre, number, name) for number, centre in enumerate(centres, 1)]
    if not made:  # a site without streams
        entries = Entries([YamlEntry("site", own, top.mark_of("name")), _store(), *_log(top, heartbeats[2])])
        made.append(_file("site.yaml", own, entries, [*top.notes_for(FILE_KEYS_LEFT_OUT), *heartbeats[2]], name))
    _check(made, top, name)
    return Imported(tuple(made))


def _path(stream: FileKeys, top: FileKeys) -> plan.ImportedStream | None:
    if not stream.text("stream"):
        stream.add_problem("stream", "expected a value (required), found nothing")
    feed, notes = plan.feed_of(stream)
    source, source_notes = read_connection(stream, top, "source")
    target, target_notes = read_connection(stream, top, "target")
    if source is None or target is None:
        return None
    if stream.get("no_target_create"):
        reason = "the target is not created: without `create` Floe stops and prints the `nats stream add`"
        target_notes.append(stream.note("no_target_create", reason))
    return plan.ImportedStream(stream, source, target, feed, [*source_notes, *notes], target_notes)


# Findings of Floe's checks on the result, reported for the file that it was made from


def _check(made: Iterable[ImportedFile], top: FileKeys, name: str) -> None:
    places = dict(_places(top))
    found: list[Problem] = []
    for file in made:
        try:
            parse_documents(file.text.encode(), file.name, dict.fromkeys(file.variables, "value"))
        except ConfigFileError as error:
            found += [_relocated(problem, file, places, name) for problem in error.found]
    if found:
        raise ConfigFileError(dict.fromkeys(found))


def _relocated(problem: Problem, file: ImportedFile, places: dict[Mark, str], name: str) -> Problem:
    parts = problem.path.split(".")
    tried = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    mark = next((file.origins[path] for path in tried if path in file.origins), Mark(0, 0))
    return Problem(name, *mark, places.get(mark, problem.path), f"{problem.message} ({file.name}: {problem.path})")


def _places(given: FileKeys) -> Iterable[tuple[Mark, str]]:
    for key, value in given.values.items():
        yield given.mark_of(key), given.key_path(key)
        for below in value if isinstance(value, tuple) else (value,):
            if isinstance(below, FileKeys):
                yield from _places(below)
