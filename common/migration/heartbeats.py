"""Heartbeats, which Floe publishes where egress reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from common.migration.durations import convert
from common.migration.entries import Entries, Entry, Variable
from common.migration.notes import Note
from common.migration.plan import Site
from common.migration.read import read_url
from common.migration.shape import Given
from common.settings.yaml import Problems

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
        entries.append(Entry("headers", headers, given.at("headers")))
    items = [Entries([_subject(subject), *_interval(subject, problems)]) for subject in subjects]
    entries.append(Entry("subjects", items, given.at("subjects")))
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


def _subject(given: Given) -> Entry:
    return Entry("subject", given.text("subject"), given.at("subject"))


def _interval(given: Given, problems: Problems) -> list[Entry]:
    try:
        interval = convert(given.text("interval"))
    except ValueError as error:
        problems.add(given.at("interval"), (given.place("interval"),), str(error))
        return []
    return [] if interval == "0s" else [Entry("interval", interval, given.at("interval"))]


def _headers(given: Given, subjects: tuple[Given, ...], notes: list[Note]) -> Entries:
    """The headers of every message: those of all subjects together, where they are the same for each."""
    common: Mapping[str, str] = given.get("headers", {})
    wanted = [{**common, **subject.get("headers", {})} for subject in subjects]
    if all(headers == wanted[0] for headers in wanted):
        common = wanted[0]
    else:
        why = "headers are the same for all subjects in Floe; those of this one are left out"
        notes += [Note(s.place("headers"), s.at("headers"), why) for s in subjects if s.has("headers")]
    return Entries(Entry(name, _hidden(name, text), given.at("headers")) for name, text in common.items())


def _hidden(name: str, text: str) -> str:
    if not _SECRET.search(name):
        return text
    return Variable(f"${{FLOE_HEARTBEAT_{re.sub('[^A-Z0-9]', '_', name.upper())}}}")
