"""Chains written straight into a bucket: segments late, shuffled, overlapping, empty and put again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.segment import Message
from common.archive.store import SegmentStore
from common.archive.writer import SpooledSegment
from common.chain import Chain
from common.sequences import SequenceRange
from infra.oracle import SubjectMap, Trace
from tests.support.segments import write_segment

OVERLAP = 40  # messages that a segment may repeat of those before it
SPOOLED = 12  # segments of a chain that are kept to be put again

HEADERS = (
    None,
    None,
    b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n",
    b"NATS/1.0\r\nNats-Msg-Id: same\r\n\r\n",
    b"NATS/1.0\r\nNats-Rollup: all\r\nX:  y \r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Last-Sequence: 7\r\nNats-TTL: 1s\r\n\r\n",
    b"NATS/1.0\r\nFloe-Source: evil NODES 0000 0 1 1\r\n\r\n",
    b"NATS/1.0\r\n\r\n",
)


@dataclass(order=True, slots=True)
class _Waiting:
    """A segment that is to be put at `due` (monotonic seconds)."""

    due: float
    spooled: SpooledSegment = field(compare=False)


class Author:
    """A writer of one chain, as an egress with a bad connection. `expected`: its messages in a target."""

    def __init__(
        self, store: SegmentStore, documents: ChainStore, chain: Chain, rng: random.Random, subject: SubjectMap
    ) -> None:
        self.chain, self.expected, self.counts = chain, Trace(), Counter[str]()
        self._store, self._documents, self._rng = store, documents, rng
        self._subject = subject
        self._first = rng.choice([1, rng.randrange(2, 2**40)])
        self._next, self._tail = self._first, 0
        self._recent: deque[Message] = deque(maxlen=OVERLAP)
        self._waiting: list[_Waiting] = []
        self._former: deque[SpooledSegment] = deque(maxlen=SPOOLED)

    def begin(self) -> None:
        """Write the chain's documents."""
        self._documents.create_stream(self.chain, StreamDocument({"name": self.chain.feed}, "t0", None))
        self._documents.create_chain(self.chain, ChainDocument((), 1, self._first))

    def step(self, rows: int) -> None:
        """Make the next segment of about `rows` messages, now and then late; put the segments that are due."""
        late = self._rng.uniform(0.5, 5.0) if self._rng.random() < 0.25 else 0.0
        self.counts["late segments"] += late > 0
        self._waiting.append(_Waiting(time.monotonic() + late, self._segment(rows)))
        self._put_due(time.monotonic())
        if self._former and self._rng.random() < 0.06:
            self._store.put(self._rng.choice(self._former))
            self.counts["segments put again"] += 1

    def finish(self) -> None:
        """Put all segments."""
        self._put_due(float("inf"))

    def _put_due(self, now: float) -> None:
        due = [one for one in self._waiting if one.due <= now]
        self._waiting = [one for one in self._waiting if one.due > now]
        self._rng.shuffle(due)
        for one in due:
            ref = self._store.put(one.spooled)
            self._former.append(one.spooled)
            self.counts["segments"] += 1
            if ref.coverage.last > self._tail:
                self._tail = ref.coverage.last
                self._documents.write_tail(self.chain, self._tail)

    def _segment(self, rows: int) -> SpooledSegment:
        """Return the next segment; it may begin before the last one ended, and may be empty."""
        first, before = self._next, list[Message]()
        if self._recent and self._rng.random() < 0.2:
            first = self._rng.choice(self._recent).sequence
            before = [message for message in self._recent if message.sequence >= first]
            self.counts["overlapping segments"] += 1
        size = self._rng.randrange(rows // 2, rows * 2)
        is_empty = self._rng.random() < 0.05
        new = [] if is_empty else [m for m in map(self._message, range(self._next, self._next + size)) if m]
        for message in new:
            self.expected.add(message, self._subject(message.subject))
        coverage = SequenceRange(first, self._next + size - 1)
        self._next += size
        self._recent.extend(new)
        return write_segment(self._store.new_spool(), [*before, *new], coverage, chain=self.chain)

    def _message(self, sequence: int) -> Message | None:
        """Return the message of this sequence; None if it was deleted."""
        if self._rng.random() < 0.05:
            return None
        subject = f"{self.chain.site}.{self.chain.feed}.n{sequence % 50}".encode()
        payload = f"{self.chain} {sequence} ".encode() + self._rng.randbytes(self._rng.randrange(500))
        return Message(sequence, time.time_ns(), subject, self._rng.choice(HEADERS), payload)


class Writer:
    """A writer of chains in a thread of its own, `rate` messages a second over all of them, until its block ends."""

    def __init__(self, authors: Sequence[Author], rng: random.Random, rate: int) -> None:
        self.authors = list(authors)
        self._rng, self._rate = rng, rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer")
        self._error: BaseException | None = None

    @property
    def expected(self) -> dict[Chain, Trace]:
        """Return the expected messages of each chain in the target; final once the block has ended."""
        return {author.chain: author.expected for author in self.authors}

    @property
    def counts(self) -> Counter[str]:
        """Return the counts of segments by kind."""
        return sum((author.counts for author in self.authors), Counter[str]())

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for author in self.authors:
                author.begin()
            rows = max(4, self._rate // len(self.authors))
            while not self._stop.wait(0.1):
                for author in self.authors:
                    if self._rng.random() < 0.1:  # about one segment a second of each chain
                        author.step(rows)
            for author in self.authors:
                author.finish()
        except BaseException as error:
            self._error = error
