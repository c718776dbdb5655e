"""The auditor: judges the target by the publishers' own log, never by Floe's reports about itself.

I1, I2 and I6 at every message that arrives: each once, in order per chain, with its original bytes, headers, sequence
and time. At the end: every message that was acknowledged to a publisher has arrived. Of the messages that a source
lost by a change, none is missing before one that arrived.
"""

import base64
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from tests.sim.streams import StoredMessage, StreamTap


class Broken(AssertionError):
    """A broken promise. The text names it, and the message."""


@dataclass(slots=True)
class Publication:
    """One message that a publisher sent. `sequence`, `time_ns`: as the source stored it, 0 if it did not.
    `is_acknowledged`: its publisher knows; `gone`: why the source dropped it before anybody read it.
    `history`: how often the source was recreated or set back before.
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
    """All messages that the publishers of one source sent, by number: every payload begins with it."""

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
    """The fate of each message at the source. `lost`: by change of the source, the messages that it removed;
    `back`: of the messages that a restore stored, the number by sequence; `archived`: last archived sequence, by chain.
    """

    def __init__(self, log: PublisherLog, archived: Callable[[], dict[str, int]] = dict) -> None:
        self._log, self.archived, self.lost = log, archived, list[list[Publication]]()
        self.back, self._ends = dict[int, int](), dict[str, int]()

    def stored(self, message: StoredMessage) -> None:
        if (publication := self._log.of(message.payload)) is not None:
            publication.sequence, publication.time_ns = message.sequence, message.time_ns
            publication.history = len(self.lost)

    def changed(self, before: Iterable[StoredMessage], after: Iterable[StoredMessage], owed_until_ns: int) -> None:
        """Record that the source now holds other messages. Those that it no longer has may be missing, unless it stored
        them before `owed_until_ns`: egress had received those.
        """
        held, old = self._all(after), self._all(before)
        for publication in held.values():
            publication.gone = publication.gone.replace("lost", "")
        self.lost.append([each for number, each in old.items() if number not in held and not each.gone])
        for publication in self.lost[-1]:
            if publication.time_ns >= owed_until_ns:
                publication.gone = "lost"

    def restored(self, message: StoredMessage) -> None:
        """Judge one message that comes back. The sequences of a restore ascend: a lower one starts a new restore."""
        found = self._log.of(message.payload)
        if found is None or fields_of(found) != fields_of(message):
            raise Broken(f"R: message {message.sequence} comes back as {fields_of(message)}, published {found}")
        if message.sequence <= max(self.back, default=message.sequence):
            self.back, self._ends = {}, self.archived()
        self.back[message.sequence] = found.number
        found.gone = found.gone.replace("lost", "")

    def not_restored(self) -> list[Publication]:
        """Return the messages that the last restore left out, though they were archived when it began."""
        held, ends = {*self.back.values()}, self._ends
        first = [each for each in self._log.all if each.history == 0 and each.sequence and each.number not in held]
        return [each for each in first if each.sequence <= ends.get(each.chain, 0)]

    def _all(self, messages: Iterable[StoredMessage]) -> dict[int, Publication]:
        found = (self._log.of(each.payload) for each in messages)
        return {each.number: each for each in found if each is not None}

    def skipped(self, seen: Set[int]) -> list[Publication]:
        """Return the messages that a change removed and that did not arrive, though a later one of the chain did."""
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
    """A judge of every message that the target stores, except those of foreign writers. `prefix`: the part before a
    subject there; `may_repeat`: in a shared target a message may arrive again.
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
        """Remove the newest message of the target."""
        if why == "lost" and (publication := self._arrived.pop()) is not None:
            self.seen.discard(publication.number)

    def missing(self) -> list[Publication]:
        """Return acknowledged messages that have not arrived, unless the source dropped or a sampler left them out."""
        found = [p for p in self._log.all if p.is_acknowledged and not p.gone and p.number not in self.seen]
        return found if self.choices is None else [p for p in found if p.number in self.choices.wanted()]

    def not_wanted(self) -> list[Publication]:
        """Return the messages that arrived though a sampler leaves them out."""
        if self.choices is None:
            return []
        return [self._log.all[number] for number in sorted(self.seen - self.choices.wanted())]


def read_copy(block: bytes | None) -> tuple[tuple[int, int] | None, bytes | None]:
    """Return the sequence and time in the provenance header of a copy, and the block that its publisher wrote.

    It follows the documented form of the headers (docs/promises.md, I6), not the product's own reader.
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
