"""The plan of a restore: pure values computed from the archive, the captures of egress and the request.

Messages that limits dropped are not sent if whole segments can be left out; the server drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa

from common.archive.captures import (
    Captured,
    CapturedConfig,
    CapturedConsumer,
    CapturedConsumers,
    CapturedDeletions,
    source_key,
)
from common.archive.segment import Reason
from common.chain import Chain
from common.clock import NS_PER_S, format_time
from common.exits import option_words
from common.nats.api import RESTORE_KEY, RESTORE_PREFIX
from common.sequences import SequenceRange
from common.settings.types import duration_words, format_count, size_words
from common.subjects import covers
from ingress.recovery.ranges import ReplayChain, ReplayPart, ReplayPlan, period_text, time_range
from ingress.recovery.retention_filter import (
    PER_SUBJECT_KEY,
    RetentionFilter,
    SourcedRow,
    config_changes,
    is_raised,
    limit_of,
)
from ingress.recovery.stream_archive import ArchiveState


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """One restore. `incarnation`: None for the newest, or for the one that was the stream at `to_time_ns`. `name`: of
    the restored stream, empty for its former name.

    `to_sequence`, `to_time_ns` (exclusive): the point in time, None for the whole archive. `replicas`: None for the
    former number. `verify`: `full`, `sample` or `state`. `promote`: False for a drill: the stream keeps its guard, and
    its consumers deliver to nobody. `subjects`: of the restored stream, empty for its former ones. `format`: of the
    archive that is sent: `auto`, `logical` or `files`. `server`: `local` for a drill on a server that is started for
    it, else empty. `allow_elsewhere`: effects outside of its own subjects are permitted; `has_effects_elsewhere`: the
    plan has found such effects, so commands repeat the permission. `skip_to`: the last sequence that no new message
    gets, 0 for the furthest one seen of the lost stream, None for the end of the archive. `directory`: of an export,
    which writes what a restore would send; else empty.
    """

    site: str
    feed: str
    incarnation: int | None = None
    name: str = ""
    to_sequence: int | None = None
    to_time_ns: int | None = None
    replicas: int | None = None
    consumers: bool = True
    verify: str = "full"
    allow_lossy: bool = False
    force: bool = False
    promote: bool = True
    format: str = "auto"
    subjects: tuple[str, ...] = ()
    server: str = ""
    allow_elsewhere: bool = False
    has_effects_elsewhere: bool = False
    skip_to: int | None = None
    directory: str = ""

    def command_options(self) -> list[str]:
        """Return the command-line options of this request, without the feed."""
        is_restore = self.promote and not self.directory
        return option_words({
            "as": is_restore and self.name,
            "subjects": ",".join(self.subjects),
            "to_sequence": self.to_sequence,
            "until": None if self.to_time_ns is None else format_time(self.to_time_ns),
            "server": self.server,
            "replicas": None if self.server else self.replicas,  # a server of a drill is in no cluster
            "no_consumers": is_restore and not self.consumers,
            "verify": is_restore and self.verify != "full" and self.verify,
            "allow_lossy": self.allow_lossy,
            "skip_to_sequence": True if self.skip_to == 0 else self.skip_to,
            "allow_elsewhere": is_restore and (self.allow_elsewhere or self.has_effects_elsewhere),
            "force": self.force,
            "format": self.format != "auto" and self.format,
        })  # fmt: skip

    @property
    def is_in_the_past(self) -> bool:
        return self.to_sequence is not None or self.to_time_ns is not None


# The stream under its guard, and afterwards

# Keys that are set only at promotion. Under the guard, they would read from or write to other subjects, refuse the
# promotion, or drop and add messages before the comparison. `max_msg_size` may be below the size of older messages.
PROMOTION_KEYS = (
    *("sources", "republish", "subject_transform", "sealed", "max_age", "subject_delete_marker_ttl"),
    "max_msg_size",
)
# Keys that are never restored, and why: a stream with messages cannot become a mirror, `placement` may not fit the
# new server.
_UNRESTORED_REASONS = {
    "mirror": "the stream comes back on its own, without an upstream",
    "mirror_direct": "it is no longer a mirror",
    "placement": "set it with `nats stream edit` if it is needed",
}
# Bytes that nats-server counts for a message, by its storage, in addition to subject, headers and payload.
FILE_RECORD_BYTES, MEMORY_RECORD_BYTES = 30, 16  # on disk four more if there are headers


def promoted_config(config: Mapping[str, Any], name: str, replicas: int | None = None) -> dict[str, Any]:
    """Return the final configuration of the stream, under `name`."""
    kept = {key: value for key, value in config.items() if key not in _UNRESTORED_REASONS}
    kept |= {"name": name, "metadata": own_metadata(config.get("metadata"))}
    if replicas is not None:
        kept["num_replicas"] = replicas
    return kept


def own_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the metadata without the keys of the server and of a restore."""
    return {k: v for k, v in (metadata or {}).items() if not k.startswith("_nats.") and k != RESTORE_KEY}


def guarded_config(config: Mapping[str, Any], marker: str) -> dict[str, Any]:
    """Return `config`, a result of `promoted_config`, for the time until promotion: no producer reaches the stream."""
    kept = {key: value for key, value in config.items() if key not in PROMOTION_KEYS}
    kept["subjects"] = [f"{RESTORE_PREFIX}{config['name']}"]
    kept["metadata"] = {**config["metadata"], RESTORE_KEY: marker}
    return kept


def with_source_starts(
    config: Mapping[str, Any], sourced: Mapping[str, SourcedRow], is_held: Callable[[SourcedRow], bool]
) -> dict[str, Any]:
    """Return `config` with a start for each source if its newest archived message is not held: the sequence after that
    message. Otherwise the server would read the source from the beginning. One with a consumer of its own has no start.
    """
    sources = [dict(source) for source in config.get("sources") or []]
    for source in (each for each in sources if not each.get("consumer")):
        if (row := sourced.get(source_key(source))) is not None and not is_held(row):
            source["opt_start_seq"] = row.source_sequence + 1
    return {**config, "sources": sources} if sources else dict(config)


def unrestored_keys(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield, as text, the keys of a captured configuration that are not restored under `name`."""
    for key, reason in _UNRESTORED_REASONS.items():
        if config.get(key):
            yield f"{key} is left out: {reason}"
    if config.get("mirror") and not config.get("subjects"):
        yield f"a mirror has no subjects: the server gives the stream the subject {name}"


# The rows, and the plan


def retained_from(
    parts: Sequence[ReplayPart], config: Mapping[str, Any], now_ns: int, *, counts: bool
) -> tuple[int, list[str]]:
    """Return the sequence below which the limits of the stream leave nothing, by whole segments (0: none), and the
    reasons as text. `counts`: every archived row counts for `max_msgs` and `max_bytes`.
    """
    begin, reasons, age = 0, list[str](), limit_of(config, "max_age")
    ends = [part.footer.last_timestamp_ns for part in parts]
    live = [part for part, end in zip(parts, ends, strict=True) if end is None or end >= now_ns - age]
    if age and len(live) < len(parts) and not _may_outlive(config):
        after = max(part.stretch.rows.last for part in parts) + 1
        begin = min((part.stretch.rows.first for part in live), default=after)
        reasons.append(limit_words("max_age", age))
    is_old = config.get("discard", "old") == "old"
    for key in ("max_msgs", "max_bytes"):
        if not (limit := limit_of(config, key)) or not counts or not is_old:
            continue
        total = 0
        for part in sorted(parts, key=lambda part: part.stretch.rows.first, reverse=True):
            # `rows` is an upper bound if a segment is used in part or others hold rows of it: do not count those.
            total += (part.rows if key == "max_msgs" else part.raw_bytes) if part.is_exact else 0
            if total >= limit:
                if part.stretch.rows.first > begin:
                    begin = part.stretch.rows.first
                    reasons.append(f"{key} {limit:,}")
                break
    return begin, reasons


def dropped_below(parts: Iterable[ReplayPart], config: Mapping[str, Any], now_ns: int, begin: int) -> int:
    """Return the sequence below which limits leave nothing, archived or not. `begin`: the result of `retained_from`."""
    if not (age := limit_of(config, "max_age")) or _may_outlive(config):
        return begin
    times = ((part.stretch.segment.coverage.first, part.footer.first_timestamp_ns) for part in parts)
    return max(begin, *(first for first, time in times if time is not None and time < now_ns - age), 0)


def _may_outlive(config: Mapping[str, Any]) -> bool:
    """True if messages may outlive `max_age`: those with a TTL of their own, and delete markers. The server decides."""
    return bool(config.get("allow_msg_ttl") or config.get("subject_delete_marker_ttl"))


def limit_words(key: str, limit: int) -> str:
    if key == "max_age":
        return f"{key} {duration_words(limit / NS_PER_S)}"
    return f"{key} {size_words(limit)}" if key == "max_bytes" else f"{key} {limit:,}"


# Reasons for a feed to omit messages of the stream.
SELECTION_REASONS = (Reason.SAMPLED_OUT, Reason.TOO_OLD, Reason.LOOPED)


@dataclass(frozen=True, slots=True)
class LongerFeed:
    """Another feed of the same stream, archived up to `end`, further than the restored range. `is_partial`: its archive
    does not hold the whole stream.
    """

    feed: str
    end: int
    is_partial: bool

    def line(self, upto: int, last: int) -> str:
        """Describe the feed. `upto`: the last restored sequence; `last`: new messages begin after it."""
        text = f"feed {self.feed} of the same stream is archived up to {self.end}: "
        if last >= self.end:
            return f"{text}{SequenceRange(upto + 1, self.end)} does not come back"
        given = SequenceRange(last + 1, self.end)
        return f"{text}{given} would be given to new messages, and {self.feed} stops then (E-ROLLED-BACK)"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The plan of a restore. `chains`: the whole history of the stream, all partitions; empty if nothing of it is
    archived. `newest`: a chain of the last incarnation. `begin`: the first sequence that is sent; `end`: the last one
    that is restored. `config`: the final configuration. `archived_end`: the end of the archive.

    `moment_ns`: the point in time, None for the whole archive; later captures do not count. `is_renamed`: the lost
    stream had another name. `longer_feeds`: other feeds of it that are archived further.

    `notes`: known deviations, as text; `lossy`: losses that are refused without `--allow-lossy`; `elsewhere`: the
    result of `common.archive.captures.outside_effects`, empty for a drill. `skip_to`: new messages begin after it, if
    it is after `end`. `sourced`: the newest archived message of each source, by its `source_key`.
    """

    request: RestoreRequest
    chains: tuple[ReplayChain, ...]
    newest: Chain
    begin: int
    end: int
    archived_end: int
    created: str
    config: Mapping[str, Any]
    consumers: tuple[CapturedConsumer, ...] = ()
    deletions: CapturedDeletions | None = None
    configs: tuple[CapturedConfig, ...] = ()
    moment_ns: int | None = None
    is_renamed: bool = False
    longer_feeds: tuple[LongerFeed, ...] = ()
    notes: tuple[str, ...] = ()
    lossy: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    skip_to: int = 0
    sourced: Mapping[str, SourcedRow] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def last_sequence(self) -> int:
        """The last sequence of the stream; new messages begin after it."""
        return max(self.end, self.skip_to)

    @property
    def parts(self) -> list[ReplayPart]:
        return [part for chain in self.chains for part in chain.parts if part.stretch.rows.last >= self.begin]

    @property
    def incarnations(self) -> list[int]:
        return sorted({self.newest.incarnation, *(chain.chain.incarnation for chain in self.chains)})

    @property
    def rows(self) -> int:
        """The number of archived messages; more than the stream will hold if the filter removes some."""
        return sum(part.rows for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.raw_bytes for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        """The bytes that a server counts for the restored stream, approximately: deleted rows reduce them by their
        share. 0 if only reading shows the remaining rows: rollups, schedules, `max_msgs_per_subject`.
        """
        if (row_filter := self.retention_filter()).needs_pass:
            return 0
        rows, size = 0, 0
        for part in self.parts:
            if (left := part.rows - row_filter.count_deleted(part.stretch.rows)) > 0:
                rows, size = rows + left, size + part.raw_bytes * left // part.rows
        size += rows * (MEMORY_RECORD_BYTES if self.config.get("storage") == "memory" else FILE_RECORD_BYTES)
        if self.config.get("discard", "old") != "old":
            return size
        if 0 < (most := limit_of(self.config, "max_msgs")) < rows:
            size = size * most // rows
        return min(size, limit_of(self.config, "max_bytes") or size)

    @property
    def time_range_ns(self) -> tuple[int, int]:
        """The times (ns) of the first and the last message; 0 if there is none."""
        return time_range(self.parts) or (0, 0)

    def archive_state(self, first: pa.RecordBatch | None, count: int) -> ArchiveState:
        """Return the state of the stream for the archive that is sent. `first`: its first rows, None if there are none;
        `count`: the number of its rows, or an upper bound.
        """
        last_ns = self.time_range_ns[1]
        if first is None:
            return ArchiveState(0, 0, self.last_sequence + 1, last_ns, self.last_sequence, last_ns)
        begin, at = first.column("sequence")[0].as_py(), first.column("timestamp_ns")[0].as_py()
        # The server accepts no more messages than sequences.
        messages = min(count, self.end - begin + 1)
        return ArchiveState(messages, self.bytes, begin, at, self.last_sequence, max(last_ns, at))

    @property
    def empty_text(self) -> str:
        """The description of the stream if no message comes back."""
        return f"no message comes back: an empty stream, which continues at {self.last_sequence + 1}"

    def retention_filter(self) -> RetentionFilter:
        return RetentionFilter(self.config, self.deletions, self.configs, self.end)

    def as_json(self) -> dict[str, Any]:
        return {
            "site": self.request.site,
            "feed": self.request.feed,
            "stream": self.name,
            "incarnations": self.incarnations,
            "first": self.begin,
            "end": self.end,
            "archived": self.archived_end,
            "last": self.last_sequence,
            "rows": self.rows,  # in a `RestoreReport`: the rows that were sent
            "archived_rows": self.rows,
            "bytes": self.bytes,
            "replicas": self.config.get("num_replicas", 1),
            "subjects": list(self.config.get("subjects") or []),
            "consumers": [consumer.name for consumer in self.consumers],
            "notes": list(self.notes),
            "lossy": list(self.lossy),
            "elsewhere": list(self.elsewhere),
        }

    def lines(self) -> Iterator[str]:
        request, numbers = self.request, ", ".join(f"{number:04d}" for number in self.incarnations)
        yield f"{request.site}/{request.feed} (incarnation {numbers}) into stream {self.name}"
        holds = f"{format_count(self.rows, 'archived message')}, {size_words(self.bytes)}"
        yield self.empty_text if self.begin > self.end else f"sequences {self.begin} to {self.end}: {holds}"
        if (last := self.last_sequence) > self.end:
            yield f"new messages begin at {last + 1}: {SequenceRange(self.end + 1, last)} is left out"
        if self.rows:
            yield period_text(*self.time_range_ns)
        subjects = ", ".join(self.config.get("subjects") or []) or "none"
        yield f"subjects {subjects}; replicas {self.config.get('num_replicas', 1)}"
        yield f"consumers: {', '.join(each.name for each in self.consumers) or 'none'}"
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"ELSEWHERE: {effect}" for effect in self.elsewhere)
        yield from (f"LOSSY: {loss}" for loss in self.lossy)


def loss_lines(
    chains: Iterable[ReplayChain], subjects: Sequence[str], filters: Mapping[Chain, Sequence[str]]
) -> Iterator[str]:
    """Yield, as text, the losses of the chains: messages of the stream that they do not hold. `subjects`: of the
    stream; `filters`: of each chain.
    """
    chains = list(chains)
    for number in sorted({chain.chain.incarnation for chain in chains}):
        own = [each for each in chains if each.chain.incarnation == number]
        taken = list(dict.fromkeys(text for each in own for text in filters.get(each.chain) or ("",)))
        left = [each for each in subjects or [">"] if not any(covers(text, each) for text in taken)]
        rows = [each.range.rows for each in own]
        count = max(each.last for each in rows) - min(each.first for each in rows) + 1 - sum(map(_least_rows, own))
        if left and count:
            froze = f"{', '.join(taken[:10])}{' …' if len(taken) > 10 else ''}"
            most = f"up to {format_count(count, 'message')} not archived"
            yield f"the feed is filtered: of {', '.join(left)} it archived {froze}: {most}"
    if any(part.footer.sampling is not None for chain in chains for part in chain.parts):
        yield "the feed is sampled"
    for chain in chains:
        counts = ReplayPlan((chain,)).ledger.counts
        for reason in SELECTION_REASONS:
            if counts.get(reason):
                yield f"{chain.chain}: {format_count(counts[reason], 'message')} left out ({reason})"
        if chain.holes:
            shown = ", ".join(map(str, chain.holes[:10])) + (" …" if len(chain.holes) > 10 else "")
            less = f"up to {format_count(sum(map(len, chain.holes)), 'message')}"
            yield f"{chain.chain}: no segment covers {shown}: {less}"


def _least_rows(chain: ReplayChain) -> int:
    """Return a lower bound for the archived messages, however rows are distributed within segments used in part."""
    parts = ((part.footer.rows, len(part.stretch.segment.coverage) - len(part.stretch.rows)) for part in chain.parts)
    return sum(max(0, rows - other) for rows, other in parts)


def lost_end_lines(known: Mapping[Chain, int], ends: Mapping[Chain, int]) -> Iterator[str]:
    """Yield, as text, the chains with segments that end (`ends`) before the `known` end of their coverage."""
    for chain in sorted(known):
        if ends[chain] < known[chain]:
            yield (
                f"{chain}: the archive covered up to {known[chain]}, and its segments end at {ends[chain]}: "
                f"{SequenceRange(ends[chain] + 1, known[chain])} is missing, up to "
                f"{format_count(known[chain] - ends[chain], 'message')}"
            )


Deleted = Callable[[SequenceRange], int]


@dataclass(frozen=True, slots=True)
class LateBegin:
    """Sequences (`lost`) before the archive of a chain, and a `line` about them. `is_known`: True if the stream had
    them, False if that is not known.
    """

    lost: SequenceRange
    line: str
    is_known: bool = True


def late_begins(
    chain: Chain, first: int, floor: int, least: int | None, join: int | None, deleted: Deleted
) -> Iterator[LateBegin]:
    """Yield the sequences missing before a chain that begins at `first`, or before the `floor` that retention left.

    `least`: the first sequence of the stream, None if not known; `join`: another incarnation holds the stream below
    this sequence, None if the chain continues none; `deleted`: returns how many of a range are known to be deleted.
    """
    begin, start = max(first, floor), max(least or 1, join or 1)
    if start >= begin or not (count := begin - start - deleted(lost := SequenceRange(start, begin - 1))):
        return
    known = "and " + (f"the stream at {least}" if least is not None else "the beginning of the stream is unknown")
    if floor > first:
        known = f"after retention of the archive, {known}"
    elif join is not None:
        known = f"and the incarnation that it continues is the same stream only up to {join - 1}"
    elif chain.incarnation:
        known = f"and it is unknown if {chain.incarnation - 1:04d} is the same stream before that"
    begin_text = f"{chain.site}/{chain.feed}/{chain.incarnation:04d} begins at {begin}, {known}"
    is_known = bool(least or (floor <= first and (join or chain.incarnation)))
    yield LateBegin(lost, f"{begin_text}: up to {format_count(count, 'sequence')} of {lost} not archived", is_known)


def other_history_lines(history: Mapping[Chain, int], ends: Mapping[Chain, int]) -> Iterator[str]:
    """Yield, as text, the ranges of chains after the last sequence that counts in `history`. `ends`: the last sequence
    of each chain.
    """
    for number, later in pairwise(sorted({chain.incarnation for chain in history})):
        for chain in (c for c, last in history.items() if c.incarnation == number and ends.get(c, 0) > last):
            lost = SequenceRange(history[chain] + 1, ends[chain])
            goes_on = f"{chain} reaches {lost.last}, and {later:04d} continues it only up to {lost.first - 1}"
            less = f"{format_count(len(lost), 'sequence')} of {lost} of another history"
            yield f"{goes_on}: {less} (restore {chain.site}/{chain.feed}/{number:04d})"


def unarchived_line(rows: int, end: int, last_seen: tuple[int, str]) -> Iterator[str]:
    """Yield a line about a stream that has no archived message, and that was captured further than `end`. `last_seen`:
    its last captured sequence, and the time of the capture.
    """
    if not rows and last_seen[0] > end:
        lost = SequenceRange(end + 1, last_seen[0])
        found = f"no message of the stream is archived; it was at {last_seen[0]} ({last_seen[1]}): {lost} is missing"
        yield f"{found}, and is given to new messages without --skip-to-sequence {last_seen[0]}"


def _limits(plan: RestorePlan) -> Iterator[str]:
    """Yield, as text, the effects of the limits of the stream on the restored messages."""
    is_new, pushed = plan.config.get("discard", "old") == "new", list[str]()
    parts = [part for chain in plan.chains for part in chain.parts]
    for key, of, sent, words in (
        ("max_msgs", sum(part.rows for part in parts), plan.rows, lambda count: format_count(count, "message")),
        ("max_bytes", sum(part.raw_bytes for part in parts), plan.bytes, size_words),
    ):
        if not (limit := limit_of(plan.config, key)) or of <= limit:
            continue
        text = limit_words(key, limit)
        if is_new:
            yield f"{text} with discard new: nothing is dropped, and new messages are refused until it holds less"
            continue
        if sent > limit:
            yield f"{text}: the server drops the oldest, up to {words(sent - limit)}"
        pushed.append(f"up to {words(of - limit)} ({text})")
    if limit := limit_of(plan.config, "max_msgs_per_subject"):
        pushed.append(f"some of their subjects (max_msgs_per_subject {limit:,})")
    is_known = plan.deletions is not None and plan.deletions.last >= plan.end
    deletes = plan.config.get("retention", "limits") != "limits" or not (
        plan.config.get("deny_delete") and plan.config.get("deny_purge")
    )
    if pushed and plan.rows and deletes and not is_known:
        yield f"deleted messages that come back may push out live ones: {', '.join(pushed)}"


AT_OR_BEFORE_TEXT = "at or before the point in time"


def capture_age(captured: Captured, now_ns: int, of_ns: int | None) -> str:
    """Return the age of a capture, as text. `of_ns`: the point in time, None for now."""
    age = duration_words(max(0, (now_ns if of_ns is None else of_ns) - captured.moment_ns) / NS_PER_S)
    clock = "" if captured.ts else ", by the clock of egress"
    return f"{age} before {'now' if of_ns is None else 'the point in time'} ({captured.moment}{clock})"


def resurrected_lines(plan: RestorePlan) -> Iterator[str]:
    """Yield, as text, the messages that are restored although a limit had dropped them before it was raised: no capture
    shows which of them were left.
    """

    def rows(first: int, last: int, until_ns: int) -> int:
        """Return an upper bound for the messages of these sequences that had arrived by that time (ns)."""
        some = (part for part in plan.parts if (part.footer.first_timestamp_ns or 0) <= until_ns)
        shares = (min(p.rows, min(last, p.stretch.rows.last) - max(first, p.stretch.rows.first) + 1) for p in some)
        return sum(max(0, share) for share in shares)

    for old, new, before in config_changes(plan.configs, plan.deletions):
        last, has_state = min(plan.end, new.last or plan.end), new.last is not None and new.last <= plan.end
        for key in (key for key in ("max_msgs", "max_bytes", "max_age", PER_SUBJECT_KEY) if is_raised(old, new, key)):
            max_count = rows(before + 1 if key == PER_SUBJECT_KEY else 0, last, new.moment_ns)
            if has_state:  # the first sequence shows the whole effect of other limits
                left = rows(new.first or 0, last, new.moment_ns) - (new.messages or 0)
                max_count = min(max_count, left) if key == PER_SUBJECT_KEY else 0
            if max_count > 0:
                applied = f"{limit_words(key, limit_of(old.config, key))} applied at least until sequence {before}"
                dropped = f"up to {format_count(max_count, 'message')} that it had dropped in between come back"
                yield f"{applied}, and was raised or lifted before {new.moment}: {dropped}"


def deviations(
    plan: RestorePlan,
    now_ns: int,
    *,
    captured: CapturedConsumers | None,
    skipped: Sequence[str],
    last_seen: tuple[int, str] = (0, ""),
) -> list[str]:
    """Return, as text, the deviations of the restored stream and the rows that are not sent. `last_seen`: as for
    `unarchived_line`.
    """
    found = list[str]()
    if plan.rows and last_seen[0] > plan.end:
        lost = SequenceRange(plan.end + 1, last_seen[0])
        text = f"the stream was at {last_seen[0]} ({last_seen[1]}): nothing of {lost} is archived"
        if last_seen[0] > plan.last_sequence:
            text += (
                f", and {SequenceRange(plan.last_sequence + 1, last_seen[0])} is given to new messages, which mirrors "
                "and sourcing streams that have read it do not get"
            )
            text += "" if plan.request.directory else f"; --skip-to-sequence {last_seen[0]} leaves it out"
        found.append(text)
    for key, row in plan.sourced.items():
        name, last = key.partition(" ")[0], row.source_sequence
        same = "if it is the same stream" + ("" if ":" in name else ", or restored up to there before this one")
        found.append(f"source {name}: continues after {last}, its newest archived message, {same}")
    if skipped:
        gone = sum(p.rows for chain in plan.chains for p in chain.parts if p.stretch.rows.last < plan.begin)
        found.append(f"{format_count(gone, 'message')} below {plan.begin} are not sent: {', '.join(skipped)}")
    found += _limits(plan)
    until = f" {AT_OR_BEFORE_TEXT}" if plan.request.is_in_the_past else ""
    if plan.request.consumers and captured is None:
        found.append(f"no consumers were captured{until}: none comes back")
    elif captured is not None:
        found.append(f"positions of consumers are those of {capture_age(captured, now_ns, plan.moment_ns)}")
    most, retention = min(plan.rows, plan.end - plan.begin + 1), plan.config.get("retention", "limits")
    bound = f"up to {format_count(most, 'message')}"
    if plan.deletions is None and plan.rows:
        word = "acknowledged" if retention != "limits" else "deleted"
        found.append(f"no deletions were captured{until}: messages {word} at the site come back, {bound}")
    elif plan.deletions is not None:
        known = plan.deletions
        behind = f"since, or after {known.last}," if known.last < plan.end else "since"
        deleted = format_count(sum(last - first + 1 for first, last in known.deleted), "sequence")
        age = capture_age(known, now_ns, plan.moment_ns)
        found.append(
            f"deletions are those of {age}, all below {known.first} and {deleted} after it: messages deleted {behind} "
            f"come back, {bound}"
        )
    if plan.config.get("allow_msg_schedules"):
        found.append(
            "schedules that fired for the last time are left out; those due since then fire when the stream is back, "
            "before nats-server 2.15 while it is filled, so that the restore ends with differences"
        )
    unread = [p for p in plan.parts if p.ledger.unread()]
    if unread:
        count = sum(part.ledger.unread() for part in unread)
        found.append(f"{format_count(count, 'message')} had left the stream before they were read")
    if len({chain.chain.partition for chain in plan.chains}) > 1 and plan.rows < (of := plan.end - plan.begin + 1):
        none = format_count(of - plan.rows, "sequence")
        found.append(f"{none} without a message: deleted at the site, or on a subject that no partition takes")
    for chain in plan.chains:
        if chain.chain.incarnation == plan.newest.incarnation and chain.range.rows.last < plan.end:
            lost = SequenceRange(chain.range.rows.last + 1, plan.end)
            # Only sequences without any row can be lost: the others have theirs.
            if (most := min(len(lost), plan.end - plan.begin + 1 - plan.rows)) > 0:
                what = f"its messages of {lost} are lost, {format_count(most, 'message')} at most"
                found.append(f"{chain.chain} was archived only up to {lost.first - 1}: {what}")
    if plan.end < plan.archived_end and plan.request.promote:
        found.append(f"the archive continues to {plan.archived_end}: egress will stop for a decision (E-ROLLED-BACK)")
    if plan.request.is_in_the_past:
        found += [each.line(plan.end, plan.last_sequence) for each in plan.longer_feeds]
    return found
