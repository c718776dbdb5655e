"""What an entry of stream-replicator's `streams` asks egress for, as the keys of a feed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.migration.durations import convert
from common.migration.entries import Entries, Entry
from common.migration.notes import Note
from common.migration.shape import Given
from common.settings.yaml import Problems

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
        self._entries.append(Entry("stream", self._stream.text("stream"), self._stream.at("stream")))
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
        self._entries.append(Entry(key, value, self._stream.at(key)))

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
        entries = Entries([Entry("subject", given.text("subject"), given.at("subject"))])
        if given.has("reliable"):
            entries.append(Entry("reliable", given.get("reliable"), given.at("reliable")))
        self._put("advisory", entries)

    def _unsampled(self) -> None:
        without = ("inspect_force_field", "inspect_duration", "warn_duration", "size_trigger", "advisory")
        for key in self._given(without):
            self._note(key, "without sampling it has no effect, in stream-replicator as in Floe")

    def _given(self, keys: tuple[str, ...]) -> Iterator[str]:
        return (key for key in keys if self._stream.get(key))
