"""Import of a configuration: a plan becomes files, one for each site and centre, checked as Floe reads them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from common.migration import plan
from common.migration.read import FILE, TOPICS_FILE, FileKeys, Keys, Note, Variable, as_streams, read, read_connection
from common.settings.loader import parse_documents
from common.settings.yaml import ConfigFileError, Mark, Problems, Scalar, parse_yaml, raise_problems
from common.subjects import covers, first_overlap, overlaps

_VARIABLE = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ENTRY = re.compile(r"\.(?:feeds|targets)\.(\d+)")
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning"}

#: Keys of the file as a whole without a counterpart, and why.
FILE_KEYS_LEFT_OUT = {
    "state_store": "samplers keep state in the bucket (snapshot_interval), none on the host",
    "logfile": "the log goes to stderr; the supervisor keeps it",
    "profiling": "the monitor has no profiler; use py-spy on the running process",
}

_STORE = {
    "url": Variable("s3://${FLOE_BUCKET}"),
    "endpoint_url": Variable("${FLOE_S3_ENDPOINT:-}"),
    "access_key_id": Variable("${FLOE_S3_KEY}"),
    "secret_access_key": Variable("${FLOE_S3_SECRET}"),
}
_SITE_HEAD = ("the site: floe egress run -c {name}",)
_CENTRE_HEAD = (
    "the centre: floe ingress run -c {name}; cron: floe compact -c {name}",
    "its targets are new and empty streams that only Floe writes to; docs/guides/migrate.md describes the change-over",
)
_VARIABLES_HEAD = "or write the values here; FLOE_S3_ENDPOINT only if the store is not Amazon's"


class _Dumper(yaml.SafeDumper):
    """A writer of YAML for Floe's reader: no aliases, and quotes around text that this would read as a number."""

    def ignore_aliases(self, _data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        value = str(text) if isinstance(text, Variable) else text.replace("${", "$${")
        is_text = isinstance(Scalar(Mark(0, 0), value, True).value(), str)
        return self.represent_scalar("tag:yaml.org,2002:str", value, None if is_text else '"')


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(Variable, _Dumper.represent_text)


def to_yaml(keys: Keys) -> str:
    """Return a document of text, numbers, flags, lists and mappings."""
    return str(yaml.dump(keys, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A configuration file to write. `site`: empty for a centre; `variables`: those that its `${…}` need; `given`: the
    entry that each of its feeds or targets was made from.
    """

    name: str
    site: str
    text: str
    variables: tuple[str, ...]
    notes: tuple[Note, ...]
    given: Sequence[FileKeys]


def _file(
    name: str, site: str, keys: Keys, notes: Iterable[Note], given: Sequence[FileKeys], source: str
) -> ImportedFile:
    unique = sorted(dict.fromkeys(notes), key=lambda note: note.mark)
    text = to_yaml(keys)
    variables = tuple(dict.fromkeys(_VARIABLE.findall(text)))
    head = [f"{name}, made from {source} by floe config import-stream-replicator"]
    head += [line.format(name=name) for line in (_SITE_HEAD if site else _CENTRE_HEAD)]
    head += [f"set in the environment: {' '.join(variables)}", _VARIABLES_HEAD]
    head += ["not imported, or changed:", *map(str, unique)] if unique else []
    # Nothing in a note ends its comment.
    comments = ("".join(c if c.isprintable() else " " for c in f"# {line}") for line in head)
    return ImportedFile(name, site, "\n".join((*comments, text)), variables, tuple(unique), given)


def _log(top: FileKeys, notes: list[Note]) -> Keys:
    if not (level := top.text("loglevel")):
        return {}
    if level not in _LEVELS:
        found = f"stream-replicator reads {level!r:.40} as info, and so does this file"
        notes.append(top.note("loglevel", f"expected debug, info or warn; {found}"))
    return {"log": {"level": _LEVELS.get(level, "info")}}


def _site_file(
    top: FileKeys, site: plan.PlannedSite, heartbeats: plan.PlannedHeartbeats, is_one_of_many: bool, source: str
) -> ImportedFile:
    publisher, beats, remarks = heartbeats
    notes = top.notes_for(FILE_KEYS_LEFT_OUT) + (remarks if publisher in (site, None) else [])
    if site.name != top.text("name"):
        reason = "choose a name that is unique over all sites of the bucket, here and in the centre's sources"
        notes.append(top.note("name", f"changed to {site.name}: {reason}"))
    egress: Keys = {"feeds": [_feed(feed) for feed in site.feeds]}
    if top.has("monitor_port"):
        port = top.get("monitor_port")
        egress = {"monitor": {"listen": f":{port}" if port else ""}, **egress}
        reason = "the port of egress; that of ingress is ingress.monitor.listen, default 127.0.0.1:9465"
        notes.append(top.note("monitor_port", reason))
    if publisher is site and beats:
        egress["heartbeats"] = beats
    notes += [note for feed in site.feeds for path in feed.paths for note in path.notes]
    name = f"site-{site.name}.yaml" if is_one_of_many else "site.yaml"
    keys = {"site": site.name, "nats": site.connection.section("source"), "store": _STORE, **_log(top, notes)}
    given = [feed.paths[0].given for feed in site.feeds]
    return _file(name, site.name, {**keys, "egress": egress}, notes, given, source)


def _feed(feed: plan.PlannedFeed) -> Keys:
    first = feed.paths[0]
    own = {} if feed.name == first.stream else {"name": feed.name}
    if len(feed.filters) > 1:
        return {**own, **first.feed, "partitions": list(feed.filters)}
    return {**own, **first.feed, **({"filter_subject": feed.filters[0]} if feed.filters[0] else {})}


def _centre_file(top: FileKeys, centre: plan.PlannedCentre, number: int, source: str) -> ImportedFile:
    notes: list[Note] = []
    created = _subjects_to_create(centre)
    targets = [_target(stream, sources, created.get(stream, []), notes) for stream, sources in centre.targets.items()]
    keys = {
        "nats": centre.connection.section("target"),
        "store": _STORE,
        **_log(top, []),
        "ingress": {"targets": targets},
    }
    given = [sources[0][2].given for sources in centre.targets.values()]
    return _file("central.yaml" if number == 1 else f"central-{number}.yaml", "", keys, notes, given, source)


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


def _target(stream: str, sources: Sequence[plan.PlannedSource], subjects: list[str], notes: list[Note]) -> Keys:
    given = sources[0][2].given
    target: Keys = {"stream": stream}
    reason = "its subjects are not its own, or not known: without `create` Floe stops and prints the `nats stream add`"
    if subjects:
        target["create"] = {"replicas": 1, "storage": "file", "subjects": subjects}
        reason = "stream-replicator gave the target the limits of the source: set replicas, max_age and max_bytes"
    if not given.get("no_target_create"):
        notes.append(given.note("target_stream" if given.has("target_stream") else "stream", reason))
    return {**target, "sources": [_source(*source, notes) for source in sources]}


def _source(site: plan.PlannedSite, feed: plan.PlannedFeed, path: plan.ImportedStream, notes: list[Note]) -> Keys:
    notes += [note for each in feed.paths if each.target_route == path.target_route for note in each.target_notes]
    changes = {f"subject_{key}": path.given.text(f"target_subject_{key}") for key in ("prefix", "remove")}
    return {"site": site.name, "feed": feed.name, **{key: text for key, text in changes.items() if text}}


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
        keys = {"site": own, "store": _STORE, **_log(top, heartbeats[2])}
        made.append(_file("site.yaml", own, keys, [*top.notes_for(FILE_KEYS_LEFT_OUT), *heartbeats[2]], (), name))
    for file in made:
        _check(file, top)
    raise_problems(top.problems)
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


def _check(file: ImportedFile, top: FileKeys) -> None:
    """Report the problems that Floe finds in the result, each at the line of the file that it was made from."""
    try:
        parse_documents(file.text.encode(), file.name, dict.fromkeys(file.variables, "value"))
    except ConfigFileError as error:
        for problem in error.found:
            place = file.given[int(entry[1])] if (entry := _ENTRY.search(problem.path)) else top
            key = next((part for part in reversed(problem.path.split(".")) if place.has(part)), "")
            top.problems.add(place.mark_of(key), (problem.path,), f"{problem.message} ({file.name})")
