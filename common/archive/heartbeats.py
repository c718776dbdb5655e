"""Heartbeats of egress: one small object for each process, written again every 30 seconds.

    {prefix}/_floe/alive/{site}/{host}[.{label}][.{worker}]

The time that the store records for it (LastModified) is the heartbeat. Its content gives the centre two facts that no
other object has: why a chain does not continue, and how far the stream itself is. A restarted process has the same name
and replaces its object. Objects of processes that never come back are ignored: for each chain the newest object that
names it counts, and an object HEARTBEAT_EXPIRY_S older than the newest of its site is not read at all.

Every program that can write to the bucket can write these objects. So the size of a read is limited, and their content
is used only for display and measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from common.chain import Chain
from common.documents import JsonCodec
from common.objects.port import ObjectInfo
from common.sequences import MAX_SEQUENCE

HEARTBEAT_EXPIRY_S = 7 * 86_400.0  # seconds by which an object is older than the newest of its site
MAX_HEARTBEAT_CHAINS = 20_000  # of one process
STANDBY = "standby"
HEARTBEAT_INTERVAL_S = 30.0  # seconds between two heartbeats of one process
HEARTBEAT_OVERDUE_S = 45.0  # seconds after one by which the next is there, unless something is wrong
OVERDUE, SILENT = "overdue", "silent"  # replace the state of a process without a recent heartbeat

_MAX_REASON_CHARS = 1000  # characters of a reason, at most


class _Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    state: str
    since: float
    code: str = ""
    why: str = ""
    end: int | None = None
    source_last: int | None = None
    source_asked: float | None = None
    first: int | None = None

    def as_tuple(self) -> tuple[Any, ...]:
        """Return the fields in order; texts are cut."""
        state, code, why = (text[:_MAX_REASON_CHARS] for text in (self.state, self.code, self.why))
        return (state, self.since, code, why, self.end, self.source_last, self.source_asked, self.first)


class _ChainWire(_Heartbeat, frozen=True, kw_only=True):
    feed: str
    partition: int
    incarnation: int


class _HeartbeatWire(msgspec.Struct, frozen=True, tag_field="format_version", tag=1):
    site: str
    owner: str
    time: float
    chains: list[_ChainWire]


_CODEC = JsonCodec(_HeartbeatWire)


class ChainHeartbeat(_Heartbeat, frozen=True, kw_only=True):
    """The report of a process about one chain. `state`, `code`, `why`: as in its /status, since `since`.

    `end`: the last archived sequence, None if it was not looked up yet. `source_last`: the last sequence of the
    stream at the last query, made at `source_asked`. `first`: the first sequence of the chain, None if it was not
    looked up yet. Times are in seconds since 1970, by the clock of the process.
    `incarnation` of `chain`: the last one that was written; 0 if none was found yet.
    """

    chain: Chain

    @property
    def is_active(self) -> bool:
        return self.state != STANDBY

    def last_known_sequence(self, incarnation: int, archived: int) -> int | None:
        """Return the last known sequence of the stream: as queried, or `archived` if that is greater; None if unknown.

        It is as queried, even if less, if the process itself saw less than it had archived (the stream was rolled
        back), or if `incarnation` is not that of the chain.
        """
        last = self.source_last
        if last is None or self.chain.incarnation != incarnation or last < (self.end or 0):
            return last
        return max(last, archived)

    def unarchived_count(self, incarnation: int, archived: int) -> int | None:
        """Return the number of sequences of the stream after the archive; None if the end of the stream is unknown.

        `incarnation`, `archived`: the newest incarnation that the reader knows, and the end of its coverage (0: none).
        """
        if self.source_last is None:
            return None
        end = max(self.end or 0, (self.first or 1) - 1)  # the chain leaves out sequences before its first
        if self.chain.incarnation > incarnation:
            return max(0, self.source_last - end)
        # A process that restarted and stopped before its first lookup knows no incarnation and reports 0.
        known = max(archived, end) if self.chain.incarnation == incarnation else archived
        return max(0, self.source_last - known)


class HeartbeatObject(msgspec.Struct, frozen=True):
    """The heartbeat object of one process. `owner`: the process that wrote it, at `time` by its own clock."""

    site: str
    owner: str
    time: float
    chains: tuple[ChainHeartbeat, ...]

    def to_json(self) -> bytes:
        wires = [
            _ChainWire(*heartbeat.as_tuple(), feed=chain.feed, partition=chain.partition, incarnation=chain.incarnation)
            for heartbeat, chain in ((each, each.chain) for each in self.chains)
        ]
        return _CODEC.encode(_HeartbeatWire(self.site, self.owner, self.time, wires))

    @classmethod
    def from_json(cls, raw: bytes) -> HeartbeatObject:
        """Parse an object of this version, or of a later one that added fields. Raises ValueError."""
        wire = _CODEC.decode(raw)
        if len(wire.chains) > MAX_HEARTBEAT_CHAINS:
            raise ValueError(f"chains: expected at most {MAX_HEARTBEAT_CHAINS}, found {len(wire.chains)}")
        return cls(wire.site, wire.owner, wire.time, tuple(_chain_heartbeat(wire.site, each) for each in wire.chains))


def _chain_heartbeat(site: str, wire: _ChainWire) -> ChainHeartbeat:
    for name, value in (("end", wire.end), ("source_last", wire.source_last), ("first", wire.first)):
        if value is not None and not 0 <= value <= MAX_SEQUENCE:
            raise ValueError(f"{name}: expected 0 to {MAX_SEQUENCE}, found {value}")
    return ChainHeartbeat(*wire.as_tuple(), chain=Chain(site, wire.feed, wire.incarnation, wire.partition))


def process_name(host: str, instance: str = "", worker: int | None = None) -> str:
    """Return the name of a process in its key: the same after a restart, different from those of its siblings."""
    return ".".join([host, *([instance] if instance else []), *([] if worker is None else [str(worker)])])


def drop_outdated(found: Iterable[tuple[str, ObjectInfo]]) -> list[ObjectInfo]:
    """Return the objects that may still be useful, from pairs (site, object): without those that are more than
    HEARTBEAT_EXPIRY_S older than the newest of their site.
    """
    objects = list(found)
    newest: dict[str, float] = {}
    for site, info in objects:
        newest[site] = max(newest.get(site, info.modified), info.modified)
    return [info for site, info in objects if info.modified >= newest[site] - HEARTBEAT_EXPIRY_S]


class StoredHeartbeat(msgspec.Struct, frozen=True):
    """The report of one object about one chain. `modified`: the heartbeat, by the store's clock; `age`: seconds since
    then; `time`: the time of writing, by the clock of the process.
    """

    heartbeat: ChainHeartbeat
    modified: float
    age: float
    time: float

    def state(self, silent_after: float) -> str:
        """Return the reported state. Without a newer heartbeat it becomes OVERDUE, then SILENT after `silent_after`
        seconds; "stopped" remains until then.
        """
        if self.age > silent_after:
            return SILENT
        return OVERDUE if self.age > HEARTBEAT_OVERDUE_S and self.heartbeat.state != "stopped" else self.heartbeat.state

    @property
    def state_duration_s(self) -> float:
        """Seconds that the state had lasted at the time of writing, by the clock of the process alone."""
        return max(0.0, self.time - self.heartbeat.since)


def newest_by_partition(heartbeats: Iterable[StoredHeartbeat]) -> dict[Chain, StoredHeartbeat]:
    """Return the heartbeat that counts for each partition, by its chain in incarnation 0000: the newest from a process
    that holds the chain. One from a standby counts only if there is no other.
    """
    found: dict[Chain, StoredHeartbeat] = {}
    for each in sorted(heartbeats, key=lambda each: (each.heartbeat.is_active, each.modified), reverse=True):
        found.setdefault(each.heartbeat.chain.with_incarnation(0), each)
    return found
