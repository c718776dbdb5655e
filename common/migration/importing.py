"""A file of stream-replicator to files of Floe: read, planned, written, and checked as Floe checks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from common.migration.feeds import feed_of
from common.migration.heartbeats import heartbeats
from common.migration.notes import Note
from common.migration.plan import Path, plan
from common.migration.read import connection
from common.migration.shape import Given, read
from common.migration.write import File, bare_site, files
from common.settings.loader import parse_documents
from common.settings.yaml import ConfigFileError, Mark, Problem, Problems, parse_yaml, read_text, refuse


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
