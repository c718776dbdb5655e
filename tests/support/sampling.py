"""A sampled feed without servers: a log in memory, its archive in a store, snapshots, and how it resumes."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.archive.columns import Columns
from common.archive.documents import ChainStore, StreamDocument
from common.archive.keys import Layout
from common.archive.segment import Ledger, Message, Reason, SegmentRef, Tip
from common.archive.store import SegmentStore
from common.chain import Chain
from common.objects.local import LocalObjects
from common.objects.port import ObjectStore
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.settings.egress import FeedSettings
from egress.advisories.advisory import Advisory
from egress.archive import Archive
from egress.deps import Pools
from egress.identity import SourceStream
from egress.partition import Partition, Position
from egress.sampling.keys import SamplingSettings
from egress.sampling.resume import ResumedSampler, SamplerResume
from egress.sampling.sampler import Notice, Sampler, SamplerState, period_ns
from egress.sampling.snapshot import Snapshot, SnapshotRef, SnapshotStore
from tests.support.clock import ManualClock
from tests.support.segments import write_segment

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND
SITE, FEED = "us-east", "NODES"
CHAIN = Chain(SITE, FEED)
CREATED = "2026-11-20T10:00:00Z"
EVERYTHING = SequenceRange(1, 10**6)


def feed(**keys: Any) -> FeedSettings:
    """Return a feed sampled by the second token of the subject, one in 100 s."""
    settings = {"inspect_subject_token": 2, "inspect_duration": "100s", "advisory": {"subject": "a.%s"}, **keys}
    return FeedSettings.model_validate({"stream": FEED, **settings})


def sent(sequence: int, node: str, seconds: float, size: int = 5) -> Message:
    """Return the message that `node` published `seconds` after the start."""
    return Message(sequence, START_NS + round(seconds * SECOND), f"nodes.{node}".encode(), None, b"x" * size)


def columns_of(messages: Sequence[Message]) -> Columns:
    """Return messages in the form that a sampler takes."""
    rows = [(m.sequence, m.timestamp_ns, m.subject, m.headers, m.payload) for m in messages]
    return Columns(*([row[place] for row in rows] for place in range(5)))


def fold(sampler: Sampler, messages: Sequence[Message]) -> list[Message]:
    """Fold all of them; return those that pass."""
    kept = sampler.fold(columns_of(messages)).kept if messages else b""
    return [message for message, passes in zip(messages, kept, strict=True) if passes]


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One key of a sampler. `seen_ns`, `size`: of its last message; `copied_ns`: the time of the last that passed."""

    value: str
    seen_ns: int
    copied_ns: int
    due_ns: int
    size: int
    notice: Notice


def known_keys(state: SamplerState) -> Iterator[KnownKey]:
    values = [value for part in state.values for value in part]
    columns = array("q", state.seen), array("q", state.due), array("I", state.sizes), state.notices
    for value, seen, due, size, notice in zip(values, *columns, strict=True):
        if value is not None:
            yield KnownKey(value, seen, due - period_ns(value, state.duration_ns), due, size, Notice(notice))


def facts(sampler: Sampler) -> dict[str, tuple[int, int, int]]:
    """Return the facts of each value: seen, due, size."""
    return {known.value: (known.seen_ns, known.due_ns, known.size) for known in known_keys(sampler.freeze())}


class SampledArchive:
    """One store, and the work of egress on it."""

    def __init__(self, folder: Path, objects: ObjectStore | None = None, **keys: Any) -> None:
        self.objects = objects or LocalObjects(folder / "store")
        self.layout, self.clock = Layout("data"), ManualClock()
        self.spool_dir = folder / "spool"
        self.store = SegmentStore(self.objects, self.layout, spool_dir=self.spool_dir, clock=self.clock)
        self.chains = ChainStore(self.objects, self.layout)
        self.part = Partition(SITE, feed(**keys))

    @property
    def sampling(self) -> SamplingSettings:
        found = SamplingSettings.from_feed(self.part.settings)
        assert found is not None
        return found

    def set(self, **keys: Any) -> None:
        """Replace settings from now on."""
        self.part = Partition(SITE, feed(**keys), self.part.number, self.part.filter_subject)

    def begin(self, chain: Chain = CHAIN, created: str = CREATED, previous: dict[int, int] | None = None) -> None:
        self.chains.create_stream(chain, StreamDocument({"name": FEED}, created, previous))

    def put(
        self,
        rows: Sequence[Message],
        coverage: SequenceRange,
        *,
        examined: Message | None = None,
        chain: Chain = CHAIN,
        level: int = 0,
        group_bytes: int = 0,
        digest: str | None = None,
    ) -> SegmentRef:
        """Put a segment with `rows`; `examined`: the last message read, by default the last row."""
        missing = len(coverage) - len(rows)
        fields = {
            "chain": chain,
            "level": level,
            "ledger": Ledger({Reason.SAMPLED_OUT: missing} if missing else {}),
            "tip": Tip.of(examined or rows[-1]) if examined or rows else None,
            "sampling": None if digest == "" else self.sampling.to_json(),
            "sampling_digest": self.sampling.digest if digest is None else digest,
        }
        spooled = write_segment(self.store.new_spool(), rows, coverage, group_bytes=group_bytes, **fields)
        ref = self.store.put(spooled)
        spooled.path.unlink()
        return ref

    def archive(self, log: Sequence[Message], ends: Iterable[int], *, chain: Chain = CHAIN, first: int = 1) -> Sampler:
        """Fold the log and put a segment up to each of `ends`; return the sampler as it is then."""
        sampler = Sampler(self.sampling)
        for end in ends:
            part = [m for m in log if first <= m.sequence <= end]
            self.put(fold(sampler, part), SequenceRange(first, end), examined=part[-1] if part else None, chain=chain)
            first = end + 1
        return sampler

    # Snapshots

    def snapshots(self, chain: Chain = CHAIN, objects: ObjectStore | None = None) -> SnapshotStore:
        store = self.store
        if objects is not None:
            store = SegmentStore(objects, self.layout, spool_dir=self.spool_dir, clock=self.clock)
        return SnapshotStore(store, chain, clock=self.clock)

    def save(
        self,
        sampler: Sampler,
        position: int,
        *,
        outbox: tuple[Advisory, ...] = (),
        chain: Chain = CHAIN,
        newest_ns: int | None = None,
    ) -> SnapshotRef:
        newest_ns = sampler.watermark_ns if newest_ns is None else newest_ns
        snapshot = Snapshot(chain, position, self.sampling.digest, newest_ns, sampler.freeze(), outbox)
        try:
            return self.snapshots(chain).save(snapshot)
        finally:
            assert not [path for path in self.spool_dir.rglob("*") if path.is_file() and path.name != "lock"]

    async def resume(
        self,
        place: int,
        source: int = 1,
        *,
        chain: Chain = CHAIN,
        first: int = 1,
        source_time_ns: int | None = None,
        objects: ObjectStore | None = None,
        **more: Any,
    ) -> ResumedSampler:
        """Resume as a worker does at `place`, with a source that holds `source` and all behind it, or `more`."""
        threads = ThreadPool("resume", 1)
        archive = Archive(chain, first, self.store, self.chains, None, Pools(*[threads] * 3))  # type: ignore[arg-type]
        try:
            await archive.load_all()
            stream = SourceStream(CREATED, source, 10**6, source_time_ns, **more)
            snapshots = self.snapshots(chain, objects)
            return await SamplerResume(self.part, archive, Position(place), stream, snapshots, self.store).run(threads)
        finally:
            await threads.wait_idle()
            threads.close()


MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
START = 1_700_000_000 * SECOND


def sampling(**more: Any) -> SamplingSettings:
    """Return settings by `sender`, hourly, with a warning after 12 minutes; `more` as keys of the configuration."""
    feed = {"stream": "S", "inspect_field": "sender", "inspect_duration": 3600.0, "warn_duration": 720.0}
    found = SamplingSettings.from_feed(FeedSettings.model_validate(feed | more))
    assert found is not None
    return found


def batch(messages: Sequence[tuple[int, bytes]], first: int = 1) -> Columns:
    """Return messages from (time in ns, payload), with subject `s` and no headers."""
    count = len(messages)
    times, payloads = [time for time, _ in messages], [payload for _, payload in messages]
    return Columns([*range(first, first + count)], times, [b"s"] * count, [None] * count, payloads)
