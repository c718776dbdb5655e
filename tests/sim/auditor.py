"""The auditor: judges the target by the publishers' own log, never by Floe's words about itself.

I1, I2 and I6 at every message that arrives: each once, in order per chain, with the bytes, headers, sequence and time
that it had. At the end: everything that was acknowledged to a publisher has arrived, and of what a source lost by a
change nothing is missing before something that arrived.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from tests.sim.streams import StoredMessage, StreamTap


class Broken(AssertionError):
    """A promise is broken; the text says which, and at which message."""


@dataclass(slots=True)
class Publication:
    """One message that a publisher sent. `sequence`, `time_ns`: as the source stored it, 0 where it did not.
    `is_acknowledged`: its publisher knows; `gone`: why the source has let it go without anybody who read it.
    `history`: how often the source was made again or set back before.
    """

    number: int
    chain: str
    subject: bytes
    headers: bytes | None
    payload: bytes
    sequence: int = 0
    time_ns: int = 0
    is_acknowledged: bool = False
    gone: str = ""
    history: int = 0


@dataclass(slots=True)
class PublisherLog:
    """All that the publishers of one source sent, by number: every payload begins with it."""

    all: list[Publication] = field(default_factory=list)

    def add(self, chain: str, subject: bytes, headers: bytes | None, rest: bytes) -> Publication:
        number = len(self.all)
        self.all.append(Publication(number, chain, subject, headers, b"%d|" % number + rest))
        return self.all[-1]

    def of(self, payload: bytes) -> Publication | None:
        number = payload.partition(b"|")[0]
        found = int(number) if number.isdigit() else -1
        return self.all[found] if 0 <= found < len(self.all) else None


class SourceTap(StreamTap):
    """Writes down what the source makes of each message. `lost`: by change of the source, what it took away; `back`:
    of what a restore put into it, by sequence, the number; `archived`: by chain, the last sequence in a segment.
    """

    def __init__(self, log: PublisherLog, archived: Callable[[], dict[str, int]] = dict) -> None:
        self._log, self.archived, self.lost = log, archived, list[list[Publication]]()
        self.back, self._ends = dict[int, int](), dict[str, int]()

    def stored(self, message: StoredMessage) -> None:
        if (publication := self._log.of(message.payload)) is not None:
            publication.sequence, publication.time_ns = message.sequence, message.time_ns
            publication.history = len(self.lost)

    def changed(self, before: Iterable[StoredMessage], after: Iterable[StoredMessage], owed_until_ns: int) -> None:
        """The source holds other messages now. What it has no more may be missing, but for what it stored before
        `owed_until_ns`: egress had received that.
        """
        held, old = self._all(after), self._all(before)
        for publication in held.values():
            publication.gone = publication.gone.replace("lost", "")
        self.lost.append([each for number, each in old.items() if number not in held and not each.gone])
        for publication in self.lost[-1]:
            if publication.time_ns >= owed_until_ns:
                publication.gone = "lost"

    def restored(self, message: StoredMessage) -> None:
        """Judge one message that comes back. The sequences of a restore ascend: a lower one begins it anew."""
        found = self._log.of(message.payload)
        if found is None or fields_of(found) != fields_of(message):
            raise Broken(f"R: message {message.sequence} comes back as {fields_of(message)}, published {found}")
        if message.sequence <= max(self.back, default=message.sequence):
            self.back, self._ends = {}, self.archived()
        self.back[message.sequence] = found.number
        found.gone = found.gone.replace("lost", "")

    def not_restored(self) -> list[Publication]:
        """What the last restore left out, though it was archived when it began."""
        held, ends = {*self.back.values()}, self._ends
        first = [each for each in self._log.all if each.history == 0 and each.sequence and each.number not in held]
        return [each for each in first if each.sequence <= ends.get(each.chain, 0)]

    def _all(self, messages: Iterable[StoredMessage]) -> dict[int, Publication]:
        found = (self._log.of(each.payload) for each in messages)
        return {each.number: each for each in found if each is not None}

    def skipped(self, seen: Set[int]) -> list[Publication]:
        """What a change took away and did not arrive, though something behind it in its chain did."""
        found = []
        for lost in self.lost:
            behind: set[tuple[str, int]] = set()
            for each in reversed(lost):
                if each.number in seen:
                    behind.add((each.chain, each.history))
                elif each.gone == "lost" and (each.chain, each.history) in behind:
                    found.append(each)
        return found

    def removed(self, message: StoredMessage, why: str) -> None:
        if (publication := self._log.of(message.payload)) is not None and why == "limit":
            publication.gone = why


def fields_of(message: Publication | StoredMessage) -> tuple[int, int, bytes, bytes | None, bytes]:
    """The five fields that a restore brings back."""
    return message.sequence, message.time_ns, message.subject, message.headers, message.payload


class Choices(Protocol):
    """The messages that a sampled feed carries, by number."""

    def wanted(self) -> Set[int]: ...


class TargetAuditor(StreamTap):
    """Judges every message that the target stores, but for those of foreign writers. `prefix`: what comes before a
    subject there; `may_repeat`: in a shared target a message may come again.
    """

    def __init__(self, log: PublisherLog, prefix: bytes, *, may_repeat: bool = False) -> None:
        self._log, self._prefix, self.may_repeat, self.repeated = log, prefix, may_repeat, 0
        self._arrived: list[Publication | None] = []  # by target sequence, from 1
        self.seen: set[int] = set()
        self.foreign = 0
        self.choices: Choices | None = None  # of a sampled feed

    def stored(self, message: StoredMessage) -> None:
        if message.payload.startswith(b"foreign"):
            self.foreign += 1
            self._arrived.append(None)
            return
        publication = self._log.of(message.payload)
        if publication is None:
            raise Broken(f"I6: nobody published what the target stores at {message.sequence}: {message.payload[:40]!r}")
        name = f"message {publication.sequence} of {publication.chain} at {message.sequence} of the target"
        if publication.number in self.seen and self.may_repeat:
            self.repeated += 1
            self._arrived.append(None)
            return
        if publication.number in self.seen:
            raise Broken(f"I2: {name} is stored twice")
        of = publication.chain, publication.history
        before = next((p for p in reversed(self._arrived) if p and (p.chain, p.history) == of), None)
        if before is not None and before.sequence >= publication.sequence:
            raise Broken(f"I1: {name} comes behind message {before.sequence}")
        self._compare(message, publication, name)
        self._arrived.append(publication)
        self.seen.add(publication.number)

    def _compare(self, message: StoredMessage, publication: Publication, name: str) -> None:
        if message.payload != publication.payload or message.subject != self._prefix + publication.subject:
            raise Broken(f"I6: {name} has another subject or payload: {message.subject!r}")
        origin, headers = read_copy(message.headers)
        if headers != publication.headers:
            raise Broken(f"I6: {name} has headers {headers!r}, published with {publication.headers!r}")
        if origin != (publication.sequence, publication.time_ns):
            raise Broken(f"I6: {name} names {origin}, stored as {publication.sequence, publication.time_ns}")

    def removed(self, message: StoredMessage, why: str) -> None:
        """The target forgets its newest message."""
        if why == "lost" and (publication := self._arrived.pop()) is not None:
            self.seen.discard(publication.number)

    def missing(self) -> list[Publication]:
        """What was acknowledged and has not arrived, unless the source let it go, or a sampler leaves it out."""
        found = [p for p in self._log.all if p.is_acknowledged and not p.gone and p.number not in self.seen]
        return found if self.choices is None else [p for p in found if p.number in self.choices.wanted()]

    def not_wanted(self) -> list[Publication]:
        """What has arrived though a sampler leaves it out."""
        if self.choices is None:
            return []
        return [self._log.all[number] for number in sorted(self.seen - self.choices.wanted())]


def read_copy(block: bytes | None) -> tuple[tuple[int, int] | None, bytes | None]:
    """The sequence and time in the provenance header of a copy, and the block that its publisher wrote.

    Read here by the documented form of the headers (docs/architecture.md, I6), not by the product's own reader.
    """
    lines = (block or b"").split(b"\r\n")
    at = next((i for i, line in enumerate(lines) if line.startswith(b"Floe-Source: ")), None)
    if at is None:
        return None, block
    words = lines[at].split(b" ")
    own = [line for line in lines[at + 1 :] if line]
    origin = int(words[5]), int(words[6])
    if not own:
        return origin, None
    if own[0].startswith(b"Floe-Block: "):
        return origin, base64.b64decode(own[0].removeprefix(b"Floe-Block: "))
    written = [line.removeprefix(b"Floe-Original: ") for line in own if line != b"Floe-Original:"]
    return origin, b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in written), b"\r\n"])
