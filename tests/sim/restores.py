"""A server's restore of an archive: it stores message after message. The stream exists from the first on.

Of the archive formats only the logical one, as nats-server 2.15 takes it. Consumers are skipped.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim import api
from tests.sim.streams import ApiRefusal, Stream
from tests.support.restore import Entry, entries, unframed

if TYPE_CHECKING:
    from tests.sim.nats import SimNats

PREFIX = b"$JS.SNAPSHOT.RESTORE."
SERVER_IDLE_LIMIT_S = 5.0  # seconds without a byte until a restore is ended
ANSWER = {"type": "io.nats.jetstream.api.v1.stream_create_response"}
FAILED = {**ANSWER, "error": {"code": 500, "err_code": 10062, "description": "restore failed: EOF"}}


@dataclass
class Archive:
    """One archive under way. `last`: of the stream; `touched`: time of the last byte."""

    stream: Stream
    last: int
    touched: float
    data: bytes = b""
    entries: int = 0
    is_whole: bool = False

    def take(self, piece: bytes) -> None:
        """Store all complete messages, if the piece ends with a frame."""
        self.data += piece
        with suppress(AssertionError, IndexError):
            for number, entry in enumerate(entries(unframed(self.data, checked=False))):
                if number >= self.entries:
                    self.entries = number + 1
                    self._store(entry)

    def _store(self, entry: Entry) -> None:
        if entry.sequence:
            self.stream.put_back(entry.sequence, entry.name, entry.headers or None, entry.payload, entry.timestamp_ns)
        elif entry.name == b"state.json":
            first = json.loads(entry.payload)["first_seq"]
            self.stream.first, self.stream.last = first, first - 1
        else:
            self.is_whole = self.is_whole or not entry.name

    def end(self) -> None:
        """Raise the stream to its last sequence."""
        stream = self.stream
        stream.last = max(stream.last, self.last)
        stream.first = stream.first if stream.sequences else stream.last + 1
        stream.enforce()


@dataclass
class Restores:
    """The restores of one server, by the subject of their archives."""

    nats: SimNats
    open: dict[bytes, Archive] = field(default_factory=dict)

    def begin(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Begin a restore. Raises ApiRefusal if the stream exists."""
        nats = self.nats
        if name in nats.streams:
            raise ApiRefusal(400, 10130, "stream name already in use, cannot restore")
        nats.streams[name] = stream = Stream(nats.world, {"name": name, **asked["config"]}, nats.taps.get(name))
        subject = PREFIX + b"%b.%d" % (name.encode(), nats.requests)
        self.open[subject] = Archive(stream, asked["state"]["last_seq"], nats.world.now)
        return {"deliver_subject": subject.decode()}

    def take(self, subject: bytes, piece: bytes) -> dict[str, Any] | None:
        """Take a piece, empty at the end. Return the answer, None if the subject has no restore."""
        archive, now = self.open.get(subject), self.nats.world.now
        if archive is None or now > archive.touched + SERVER_IDLE_LIMIT_S:
            return None
        archive.touched = now
        if piece:
            archive.take(piece)
            return {}
        del self.open[subject]
        if not archive.is_whole:
            return FAILED
        archive.end()
        return {**ANSWER, **api.stream_info(archive.stream, {})}
