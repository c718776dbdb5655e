"""Read the archived history of a stream: make the plan of a restore, and return the rows in order."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from common.archive.captures import (
    CONFIG,
    CONSUMERS,
    DELETIONS,
    CapturedConfig,
    CapturedConsumers,
    CapturedDeletions,
    CapturedRestore,
    CaptureStore,
    check_config,
    outside_effects,
    source_key,
)
from common.archive.catalog import chain_ends, first_sequence
from common.archive.scan import RELIST_ATTEMPTS, ChainArchive, Hole, Problem, ReadAhead, Scan, with_current_listing
from common.archive.segment import SegmentRef
from common.archive.store import SegmentStore
from common.archive.times import search
from common.chain import Chain
from common.clock import NS_PER_S, Backoff, doubling_delays, format_time, parse_time
from common.errors import DataError, Stopped, Unavailable, UsageError
from common.exits import choices, floe_command, name_argument, verify_command
from common.nats.api import WORK_QUEUE
from common.sequences import MAX_SEQUENCE, SequenceRange, holes
from common.service.process import ThreadPool
from common.service.progress import format_share
from common.settings.types import format_count
from common.tasks import Stop
from ingress.recovery.plan import (
    AT_OR_BEFORE_TEXT,
    SELECTION_REASONS,
    LateBegin,
    LongerFeed,
    RestorePlan,
    RestoreRequest,
    capture_age,
    deviations,
    dropped_below,
    late_begins,
    loss_lines,
    lost_end_lines,
    other_history_lines,
    promoted_config,
    resurrected_lines,
    retained_from,
    unarchived_line,
    unrestored_keys,
)
from ingress.recovery.ranges import ChainRange, ReplayChain, by_incarnation
from ingress.recovery.request import RecoveryParts, ReplayRequest
from ingress.recovery.retention_filter import SourcedRow, sourced_rows
from ingress.recovery.stream_archive import as_pull_consumer, restorable_consumers, with_replicas
from ingress.recovery.survey import ReplaySurvey, SegmentTimes, known_chains

STORE_BACKOFF = doubling_delays(1.0, 15.0)  # seconds between attempts to read from an unavailable store
TIME_COLUMNS = ("sequence", "timestamp_ns")
READER_THREADS = 8  # threads that fetch segments before they are read
PREFETCH_BYTES = 64 * 1024 * 1024  # bytes of segments that are in the spool before they are read
EXPIRED_CODE = "E-RESTORE-EXPIRED"
SOURCE_SEARCH_ROWS = 50_000  # sequences at the end of the archive that are searched first for messages of sources


def repeat_command(request: RestoreRequest, *more: str) -> str:
    feed = name_argument(request.site, request.feed, request.incarnation)
    words = [*dict.fromkeys((*request.command_options(), *more))]
    if request.directory:
        return floe_command("export", feed, shlex.quote(request.directory), *words)
    return floe_command("restore", feed, *words) if request.promote else floe_command("drill", feed, "--exact", *words)


class ArchivedHistory:
    """The archived history of one stream: all its chains."""

    def __init__(self, request: RestoreRequest, parts: RecoveryParts, threads: ThreadPool) -> None:
        self._request, self._threads = request, threads
        self._store, self._documents, self._clock, self._progress = parts
        self._captures = CaptureStore(self._documents.layout, self._documents.objects)
        self._readers = ThreadPoolExecutor(READER_THREADS, "restore-read")
        self.progress_text, self._began = "listing the segments", 0.0  # of the chain that `plan` reads; its start

    def close(self) -> None:
        """Stop prefetching segments."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _survey_progress(self, chain: Chain, done: int, total: int) -> None:
        now = self._clock.monotonic()
        self._began = self._began if done else now
        share = format_share(done, total, now - self._began)
        self.progress_text = f"{share}  {done:,} of {format_count(total, 'segment')} of {chain} examined"

    async def plan(self) -> RestorePlan:
        """Make the plan of the restore. Nothing is written, and no NATS server is contacted.

        Raises UsageError if there is no such history or point in time, DataError for damage, and errors of the store.
        """
        request, call = self._request, self._threads.run
        history = await call(self._history)
        if (then := await call(self._incarnation_then, newest := max(history))) != newest.incarnation:
            self._progress.print(f"note: incarnation {then:04d} was the newest then")
            request = self._request = replace(request, incarnation=then)
            history = await call(self._history)
        known = await call(self._known_ends, history)  # before segments are listed, or growth would look like loss
        if (to_sequence := request.to_sequence) is None and request.to_time_ns is not None:
            to_sequence = await call(self._last_before, history, request.to_time_ns)
        chains, notes, reached = list[ReplayChain](), list[str](), set[Chain]()
        for own in by_incarnation(history):
            if to_sequence is None or await call(self._first_sequence, own) <= to_sequence:
                reached.update(own)
                for wanted in await call(self._requests, {chain: history[chain] for chain in own}, to_sequence):
                    surveyed, found = await self._survey(wanted)
                    chains += surveyed
                    notes += found
        if not reached:
            raise UsageError(
                f"{request.site}/{request.feed}: expected a point in time at or after its first sequence, "
                f"{await call(self._first_sequence, history)}, found {to_sequence}"
            )
        upto = MAX_SEQUENCE if to_sequence is None else to_sequence
        known = {chain: min(end, upto) for chain, end in known.items() if chain in reached}
        return await call(self._make_plan, history, chains, notes, known)

    def _requests(self, ends: Mapping[Chain, int], to_sequence: int | None) -> list[ReplayRequest]:
        """Return the requests for an incarnation: one, unless its partitions count up to different sequences. `ends`:
        its chains, each with the last sequence that counts.
        """
        upto = {chain: min(end, to_sequence or end) for chain, end in ends.items()}
        site, feed, is_one = self._request.site, self._request.feed, len({*upto.values()}) == 1
        wanted = ReplayRequest(site, feed, "", incarnation=min(ends).incarnation)
        parts = [c for c in ends if first_sequence(self._documents, c) <= ends[c]]
        parts = [c for c in parts if self._first_sequence([c]) <= upto[c]]
        return [
            replace(wanted, partition=None if is_one else c.partition, to_sequence=upto[c] % MAX_SEQUENCE or None)
            for c in (parts[:1] if is_one else parts)
        ]

    async def _survey(self, wanted: ReplayRequest) -> tuple[Sequence[ReplayChain], list[str]]:
        """Return the chains of a request and notes for an operator. Try again if retention deletes meanwhile."""
        for left in reversed(range(RELIST_ATTEMPTS)):
            survey = ReplaySurvey(self._store, self._documents, self._threads, self._clock, wanted)
            survey.progress, survey.counts_lost_end = self._survey_progress, False  # the plan has it
            try:
                return (await survey.run())[0].chains, survey.notes
            except Stopped as error:
                if error.code != "E-FLOOR" or not left:
                    raise
        raise AssertionError("the last attempt raises")

    def growth(self, plan: RestorePlan) -> str:
        """Return, as text, a chain that is archived further than in the plan; empty if there is none. No segment is
        read. Blocking. Raises the errors of `plan`.
        """
        ends = {each.chain: each.range.rows.last for each in plan.chains}
        for chain, end in self._listed_ends(self._history()).items():
            if end > (before := ends[chain] if chain in ends else first_sequence(self._documents, chain) - 1):
                return f"{chain} was archived up to {before}, and now up to {end}"
        return ""

    def _listed_ends(self, history: Mapping[Chain, int]) -> dict[Chain, int]:
        """Return the last sequence in the segments of each chain that has segments, as far as it counts."""
        found = {chain: ChainArchive.listed(self._store, chain).end for chain in history}
        return {chain: min(end, history[chain]) for chain, end in found.items() if end}

    def _history(self) -> dict[Chain, int]:
        """Return the chains of the stream, each with the last sequence that counts. Blocking."""
        request = self._request
        wanted = ReplayRequest(request.site, request.feed, "", incarnation=request.incarnation)
        known = wanted.chains(known_chains(self._documents, wanted))
        return chain_ends(self._documents, known[-1])

    def _known_ends(self, history: Mapping[Chain, int]) -> dict[Chain, int]:
        """Return the end of the coverage of each chain, from the documents and captures of the archive (0: none)."""
        found = {}
        for chain, most in history.items():
            if (end := self._documents.read_end(chain)) is None:
                end = self._documents.read_tail(chain) or 0
                if not chain.partition:  # captures are named by the coverage of partition 0
                    for kind in (CONFIG, CONSUMERS, DELETIONS):
                        end = max([end, *(ref.end for ref in self._captures.list_captures(chain, kind))])
            found[chain] = min(end, most)
        return found

    def _last_before(self, history: Mapping[Chain, int], moment_ns: int) -> int | None:
        """Return the last sequence before a time; None if all rows are earlier. Raises UsageError if no row is."""
        rows = ((search(self._store, chain, moment_ns)[0], end) for chain, end in history.items())
        found = [first for first, end in rows if first is not None and first <= end]
        first_ns = self._first_ns(history)
        if first_ns is not None and moment_ns <= first_ns:
            raise UsageError(
                f"{self._request.site}/{self._request.feed}/{min(history).incarnation:04d}: expected a point in time "
                f"after its first archived message, of {format_time(first_ns)}, found {format_time(moment_ns)}"
            )
        return min(found) - 1 if found else None

    def _incarnation_then(self, newest: Chain) -> int:
        """Return the last incarnation that had begun at the requested time, the oldest if none had; that of `newest`
        without a time, or if one is named. Blocking.

        Raises UsageError if it is not known which of two it was.
        """
        moment_ns, name = self._request.to_time_ns, f"{newest.site}/{newest.feed}"
        if moment_ns is None or self._request.incarnation is not None:
            return newest.incarnation
        found = by_incarnation(self._documents.chains(newest.site, newest.feed))
        for before, own in reversed([*pairwise(found)]):
            created = min(map(parse_time, self._creation_times(own[0].with_partition(0))), default=0)
            if created > moment_ns:
                continue  # it cannot have begun before that
            earliest, latest = self._begin(created, own, before)
            if latest <= moment_ns:
                return own[0].incarnation
            if earliest < moment_ns:
                raise UsageError(
                    f"{name}: expected a time before {format_time(earliest)} or after {format_time(latest)}, found "
                    f"{format_time(moment_ns)}; the stream was set back in between: name incarnation "
                    f"{before[0].incarnation:04d} or {own[0].incarnation:04d}"
                )
        return found[0][0].incarnation

    def _begin(self, created: int, own: Sequence[Chain], before: Sequence[Chain]) -> tuple[int, int]:
        """Return the earliest and the latest time (ns) at which the incarnation of the chains `own` can have begun. Its
        stream was `created` (ns) before or then.
        """
        chain, documents = own[0].with_partition(0), self._documents
        if created > (ended := max(self._looked_up(each, lambda times: times.last_ns) or 0 for each in before)):
            return created, created
        info = documents.objects.head(documents.layout.stream_document(chain))
        known = (self._first_ns(own), info and int(info.modified * NS_PER_S))
        latest = min((each for each in known if each is not None and each > ended), default=ended)
        is_same = (document := documents.read_stream(chain)) is not None and document.continues
        return latest if is_same else ended, latest

    def _first_ns(self, chains: Iterable[Chain]) -> int | None:
        """Return the time of the first archived message of some chains; None without one. Blocking."""
        times = (self._looked_up(chain, lambda times: times.extent()[0]) for chain in chains)
        return min((each for each in times if each is not None), default=None)

    def _looked_up(self, chain: Chain, look_up: Callable[[SegmentTimes], int | None]) -> int | None:
        begin = first_sequence(self._documents, chain)
        return with_current_listing(self._store, chain, lambda refs: look_up(SegmentTimes(self._store, refs, begin)))

    def _first_sequence(self, chains: Iterable[Chain]) -> int:
        """Return the first sequence of some chains, without regard to retention. Blocking."""
        documents = map(self._documents.read_chain, chains)
        return min((document.first for document in documents if document is not None), default=1)

    def _make_plan(
        self, history: Mapping[Chain, int], chains: list[ReplayChain], notes: list[str], known: dict[Chain, int]
    ) -> RestorePlan:
        """Make the plan. `known`: the requested chains, each with the end of its coverage within the request."""
        request, newest = self._request, max(known)
        ends = {chain: min(first_sequence(self._documents, chain) - 1, history[chain]) for chain in known}
        ends |= {chain.chain: chain.range.rows.last for chain in chains}
        end = max(*ends.values(), *known.values())  # lost messages keep their sequences: targets may have them
        archived = max([end, *self._listed_ends(history).values()])
        upto, moment_ns = (end, self._point_in_time(chains, archived)) if request.is_in_the_past else (None, None)
        config, created = self._config(newest, upto, moment_ns, notes)
        was = str(config.get("name") or request.feed)
        end = end if chains else max(end, int(config.get("first_seq") or 1) - 1)
        captured: CapturedConsumers | None = None
        deletions: CapturedDeletions | None = None
        configs = list[CapturedConfig]()
        for own in reversed(by_incarnation(known)):
            of = own[0].with_partition(0)
            captured = captured or (self._captures.consumers(of, end, moment_ns) if request.consumers else None)
            deletions = deletions or self._captures.deletions(of, end, moment_ns)
            configs = [*self._captures.configs(of, upto, moment_ns), *configs]
            if (document := self._documents.read_stream(of)) is None or not document.continues:
                break  # captures from before a rollback of the stream do not describe it
        with suppress(ValueError):  # an invalid configuration is refused only if it is used
            if document is not None:
                at, first = document.created, self._first_sequence(own)
                configs.insert(0, CapturedConfig(at, first - 1, at, dict(document.config)))
        last_seen, skip_to, near = (0, ""), 0, list[str]()
        if not request.is_in_the_past:
            last_seen, near = self._last_seen(newest), [*self._downstream_positions(newest)]
            before = self._captures.restored(newest)
            skip_to = max(end, before.skipped_to if before else 0)
            last_seen = last_seen if last_seen[0] > skip_to else (0, "")  # else no further sequence is lost
        if request.skip_to is not None:
            skip_to = max(skip_to, request.skip_to or last_seen[0])
        consumers, inexact = restorable_consumers(captured, max(end, skip_to)) if captured else ([], [])
        if not request.promote:
            consumers = [as_pull_consumer(consumer) for consumer in consumers]
        promoted = promoted_config(config, request.name or was, request.replicas)
        consumers, uneven_replicas = with_replicas(consumers, promoted)
        rows = sum(chain.rows for chain in chains)
        if rows and request.verify != "state" and config.get("retention") == WORK_QUEUE:
            request = replace(request, verify="state")
            notes.append("a work queue is read by its workers only: its state is compared, and no message is read back")
        filters = {c.chain: d.filters for c in chains if (d := self._documents.read_chain(c.chain)) is not None}
        subjects = [str(subject) for subject in config.get("subjects") or []]
        now_ns = int(self._clock.now() * NS_PER_S)
        is_renamed = request.name not in ("", was)
        further = tuple(self._longer_feeds(newest, was, created, end)) if request.promote and not is_renamed else ()
        lossy = [*loss_lines(chains, subjects, filters), *lost_end_lines(known, ends)]
        lossy += unarchived_line(rows, end, last_seen)
        lossy += () if request.is_in_the_past else (each.line(end, max(end, skip_to)) for each in further)
        plan = RestorePlan(
            request,
            tuple(chains),
            newest=newest,
            begin=min((chain.range.rows.first for chain in chains), default=end + 1),
            end=end,
            archived_end=archived,
            created=created,
            config=promoted,
            consumers=tuple(consumers),
            deletions=deletions,
            configs=tuple(configs),
            moment_ns=moment_ns,
            skip_to=skip_to,
            is_renamed=is_renamed,
            longer_feeds=further,
        )
        row_filter = plan.retention_filter()
        counts = not row_filter.needs_pass and deletions is None
        begin, skipped = retained_from(plan.parts, plan.config, now_ns, counts=counts)
        if row_filter.floor > max(begin, plan.begin):
            begin, skipped = min(row_filter.floor, end + 1), ["the stream did not hold them when it was captured last"]
        is_later = begin > plan.begin
        floor = dropped_below(plan.parts, plan.config, now_ns, begin)
        late = [b for b in self._late_begins(sorted(known), min(history).incarnation, plan) if b.lost.last >= floor]
        missing = dict.fromkeys(each.line for each in late if each.is_known)
        notes += [each.line for each in late if not each.is_known]
        others = tuple(other_history_lines(history, {chain: self._recorded_end(chain) for chain in known}))
        if request.to_time_ns is None or newest.incarnation == max(history).incarnation:
            notes, others = [*notes, *others], ()
        plan = replace(plan, begin=max(begin, plan.begin), lossy=(*missing, *others, *lossy))
        if request.promote:
            plan = self._with_effects(plan)
        found = deviations(plan, now_ns, captured=captured, skipped=skipped if is_later else (), last_seen=last_seen)
        found += [*resurrected_lines(plan), *near, *unrestored_keys(config, plan.name), *inexact, *uneven_replicas]
        return replace(plan, notes=tuple(dict.fromkeys([*notes, *found])))

    def _with_effects(self, plan: RestorePlan) -> RestorePlan:
        """Return the plan with its effects on other subjects and the newest message of each source. Blocking."""
        keys = {source_key(source) for source in plan.config.get("sources") or []}
        sourced, name = self._newest_sourced(plan, keys) if keys else {}, self._request.name or self._request.feed
        pushed = {each.name: str(to) for each in plan.consumers if (to := each.config.get("deliver_subject"))}
        effects = tuple(outside_effects(name, plan.config, pushed, keys - {*sourced}))
        self._request = replace(self._request, has_effects_elsewhere=bool(effects))
        request = replace(plan.request, has_effects_elsewhere=bool(effects))
        return replace(plan, request=request, elsewhere=effects, sourced=sourced)

    def _newest_sourced(self, plan: RestorePlan, keys: Collection[str]) -> dict[str, SourcedRow]:
        """Return the newest archived message of each source, searched backwards from the end in growing steps."""
        begin, low, step = min((c.range.rows.first for c in plan.chains), default=0), plan.end + 1, SOURCE_SEARCH_ROWS
        found, stop = dict[str, SourcedRow](), Stop()
        stop.set()  # an unavailable store ends the plan
        while plan.chains and begin < low and len(found) < len(keys):
            until, low, step = low, max(begin, low - step), 8 * step
            for batch in self.rows(plan, low, ("sequence", "timestamp_ns", "headers"), stop, until - 1):
                for key, row in sourced_rows(batch):
                    for each in {key} & {*keys} or [of for of in keys if of.partition(" ")[0] == key]:
                        found[each] = max(row, found.get(each, row))
        return found

    def restores(self, streams: Collection[str]) -> Iterator[tuple[str, int, CapturedRestore]]:
        """Yield the last restore of each incarnation of these streams of the site, after the name of the stream and the
        time (ns) at which the incarnation was created. Blocking.
        """
        for chain in self._documents.chains(self._request.site):
            document = None if chain.partition else self._documents.read_stream(chain)
            name = str(document.config.get("name")) if document is not None else ""
            if document is not None and name in streams and (found := self._captures.restored(chain)) is not None:
                yield name, parse_time(document.created), found

    def _downstream_positions(self, newest: Chain) -> Iterator[str]:
        """Yield, as text, the captured positions of mirrors and of streams that source from this one."""
        if (found := self._captures.consumers(newest)) is not None:
            for each in (each for each in found.consumers if each.name.startswith(("JS_MIRROR_", "JS_SRC_"))):
                of = (each.config.get("metadata") or {}).get("_nats.src.stream", "a stream elsewhere")
                yield f"{of} had read up to {each.delivered_stream} by {each.name} ({found.at})"

    def _point_in_time(self, chains: Sequence[ReplayChain], archived: int) -> int | None:
        """Return the point in time (ns): the requested one, or the time of the last message up to the requested
        sequence; None if the archive ends before that sequence, or has no message up to it.
        """
        request, found = self._request, list[int]()
        if request.to_time_ns is not None or (request.to_sequence or 0) > archived:
            return request.to_time_ns
        for chain in chains:
            for part in reversed(chain.parts):
                last, rows = part.footer.last_timestamp_ns if part.is_exact else None, part.stretch.rows
                if last is None:
                    archive = ChainArchive(self._store, chain.chain)
                    for batch in Scan(archive, rows, lambda _: None, columns=TIME_COLUMNS).batches():
                        last = batch.column("timestamp_ns")[-1].as_py()
                if last is not None:
                    found.append(last)
                    break
        return max(found, default=None)

    def _recorded_end(self, chain: Chain) -> int:
        """Return the recorded end of a chain, or its last sequence before the requested time; 0: not known."""
        end, moment_ns = self._documents.read_end(chain) or 0, self._request.to_time_ns
        first = search(self._store, chain, moment_ns)[0] if moment_ns is not None else None
        return end if first is None else min(end, first - 1)

    def _late_begins(self, chains: Sequence[Chain], oldest: int, plan: RestorePlan) -> Iterator[LateBegin]:
        """Yield the sequences missing before `chains` (ascending): of the stream, or of the chain they continue."""
        streams = [self._documents.read_stream(chain) for chain in chains]
        firsts = [each.stream_first for each in streams if each is not None and each.stream_first]
        least = max(1, plan.deletions.first) if plan.deletions is not None else firsts[-1] if firsts else None
        is_seen = plan.deletions is not None or plan.config.get("retention", "limits") == "limits"
        for chain, stream in zip(chains, streams, strict=True):
            first, floor = self._first_sequence([chain]), self._documents.read_floor(chain) or 1
            joins = {} if stream is None or chain.incarnation == oldest else stream.join_sequences
            known, join = least if is_seen or floor <= first else None, joins.get(chain.partition)
            yield from late_begins(chain, first, floor, known, join, plan.retention_filter().count_deleted)

    def _last_seen(self, newest: Chain) -> tuple[int, str]:
        """Return the last sequence of the stream in captures and heartbeats since its last restore, and its time; 0 and
        an empty text if there is none.
        """
        since = parse_time(found.at) if (found := self._captures.restored(newest)) else 0
        seen = [(0, "")]
        if (gone := self._captures.deletions(newest)) is not None:
            seen.append((gone.last, gone.at))
        if (captured := self._captures.consumers(newest)) is not None:
            seen.append((max((each.delivered_stream for each in captured.consumers), default=0), captured.at))
        documents = self._documents
        processes = (documents.read_heartbeat(info.key) for info in documents.list_heartbeats(newest.site))
        for heartbeat in (each for alive in processes if alive is not None for each in alive.chains):
            last, read_at, chain = heartbeat.source_last or 0, heartbeat.source_asked, heartbeat.chain
            is_of_it = (chain.feed, chain.incarnation) == (newest.feed, newest.incarnation)
            if is_of_it and read_at is not None and last >= (heartbeat.first or 1):
                seen.append((last, format_time(int(read_at * NS_PER_S))))
        return max(each for each in seen if not each[1] or parse_time(each[1]) > since)

    def _longer_feeds(self, newest: Chain, name: str, created: str, end: int) -> Iterator[LongerFeed]:
        """Yield the other feeds of the stream that are archived further than `end`."""
        times = {created, *self._creation_times(newest)}
        others = {chain.feed: chain for chain in self._documents.chains(newest.site) if chain.feed != newest.feed}
        for last in others.values():  # the newest incarnation of each
            document = self._documents.read_stream(last)
            if document is None or document.config.get("name") != name or not times & {*self._creation_times(last)}:
                continue
            chains = [*map(last.with_partition, range(last.partition + 1))]
            refs = [ref for chain in chains for ref in ChainArchive.listed(self._store, chain, end + 1).refs]
            known = [self._documents.read_tail(chain) or 0 for chain in chains]
            if (reached := max([*known, *(ref.coverage.last for ref in refs)])) > end:
                filters = [each for chain in chains if (d := self._documents.read_chain(chain)) for each in d.filters]
                is_partial = (bool(filters) and len(chains) == 1) or not refs or selects_rows(self._store, refs[-1])
                yield LongerFeed(last.feed, reached, is_partial)

    def _creation_times(self, chain: Chain) -> Iterator[str]:
        """Yield the creation times of the stream that are recorded for its incarnation."""
        if (document := self._documents.read_stream(chain)) is not None:
            yield document.created
        if (captured := self._captures.config(chain)) is not None:
            yield captured.created

    def _config(
        self, newest: Chain, upto: int | None, moment_ns: int | None, notes: list[str]
    ) -> tuple[dict[str, Any], str]:
        """Return the configuration of the stream at the point in time, and its creation time."""
        if (captured := self._captures.config(newest, upto, moment_ns)) is not None:
            if upto is not None:
                age = capture_age(captured, int(self._clock.now() * NS_PER_S), moment_ns)
                notes.append(f"the configuration was captured {age}")
            return dict(captured.config), captured.created
        if (document := self._documents.read_stream(newest)) is None:
            raise DataError(
                f"{newest}: expected stream.json or a captured configuration, found none",
                hint="restore the documents of the archive from a copy of the bucket",
            )
        try:
            check_config(document.config)
        except ValueError as error:
            raise DataError(f"{newest}: stream.json: {error}", code="E-STATE-JSON") from error
        until = "since" if upto is None else AT_OR_BEFORE_TEXT
        notes.append(f"the configuration is from the beginning of the feed: none was captured {until}")
        return dict(document.config), document.created

    # Rows

    def rows(
        self, plan: RestorePlan, begin: int, columns: tuple[str, ...], stop: Stop, last: int = MAX_SEQUENCE
    ) -> Iterator[pa.RecordBatch]:
        """Return the rows of all partitions of the whole history by sequence, from `begin` to `last`. Blocking.

        Waits for an unavailable store until `stop` is set. Raises DataError if rows cannot be read, Unavailable
        (E-RESTORE-EXPIRED) if retention deleted them after the plan.
        """
        ranges = [
            ChainRange(chain.chain, SequenceRange(max(part.first, begin), min(part.last, last)))
            for chain in plan.chains
            for part in holes(holes([part.stretch.rows for part in chain.parts], chain.range.rows), chain.range.rows)
            if part.last >= begin and part.first <= last
        ]
        partitions = len({each.chain.partition for each in ranges})  # read concurrently
        ahead = ReadAhead(self._readers, PREFETCH_BYTES // max(1, partitions))
        return merge_rows([(each.rows.first, partial(self._chain_rows, each, columns, stop, ahead)) for each in ranges])

    def _chain_rows(
        self, each: ChainRange, columns: tuple[str, ...], stop: Stop, ahead: ReadAhead
    ) -> Iterator[pa.RecordBatch]:
        refuse, backoff = partial(self._refuse_hole, each.chain), Backoff(None, STORE_BACKOFF)
        scan = Scan(ChainArchive(self._store, each.chain), each.rows, refuse, columns=columns, ahead=ahead)
        while True:
            try:
                for batch in scan.batches():
                    yield batch
                    backoff.reset()
                return
            except Unavailable as error:
                if stop.is_set or error.code == EXPIRED_CODE:
                    raise
                self._progress.print(f"waiting for the store: {error.message}")
                self._clock.block(backoff.next_delay())

    def _refuse_hole(self, chain: Chain, problem: Problem) -> None:
        """Raise the error of a hole. Damage that other segments cover is no problem."""
        if not isinstance(problem, Hole):
            return
        if (floor := self._documents.floor(chain)) is not None and floor.first > problem.rows.first:
            raise Unavailable(
                f"chain {chain}: {floor}, while it was read",
                hint=choices(("it begins again by itself, five times; then", repeat_command(self._request))),
                code=EXPIRED_CODE,
            )
        raise DataError(
            f"chain {chain}: rows cannot be read: {'; '.join(map(str, [*problem.causes[:4], problem]))}",
            hint=choices(
                ("restore the objects; to list all damaged ones", verify_command(str(chain))),
                ("or quarantine them, and restore the rest", repeat_command(self._request, "--allow-lossy")),
            ),
            code="E-SEG-CORRUPT",
        )


RowStream = tuple[int, Callable[[], Iterator[pa.RecordBatch]]]  # the least sequence it may have, and its rows


def selects_rows(store: SegmentStore, ref: SegmentRef) -> bool:
    """Return True if the feed of the segment omits messages, as a sampled one does, or if the segment is unreadable."""
    with suppress(DataError):
        footer = store.footer(ref)
        return footer.sampling is not None or any(reason in footer.ledger.counts for reason in SELECTION_REASONS)
    return True


def merge_rows(sources: Sequence[RowStream]) -> Iterator[pa.RecordBatch]:
    """Merge the rows of all sources by sequence, each sequence once. A source is opened when its rows are due."""
    waiting = sorted(sources, key=lambda source: source[0])
    open_: list[list[Any]] = []  # iterator, and the rest of its current batch; None after its end
    while waiting or open_:
        reach = min((held[1].column("sequence")[-1].as_py() for held in open_), default=waiting[0][0] if waiting else 0)
        if waiting and waiting[0][0] <= reach:
            rows = waiting.pop(0)[1]()
            if (batch := next(rows, None)) is not None:
                open_.append([rows, batch])
            continue
        parts = []
        for held in open_:
            rows, batch = held
            count = int(np.searchsorted(np.asarray(batch.column("sequence")), reach, side="right"))
            parts.append(batch.slice(0, count))
            held[1] = batch.slice(count) if count < batch.num_rows else next(rows, None)
        open_ = [held for held in open_ if held[1] is not None]
        yield _concat([part for part in parts if part.num_rows])


def _concat(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    every = pa.Table.from_batches(parts).unify_dictionaries().combine_chunks()
    sequences = np.asarray(every.column("sequence"))
    order = np.argsort(sequences, kind="stable")
    once: Any = order[np.r_[True, np.diff(sequences[order]) != 0]]
    return every.take(once).combine_chunks().to_batches()[0]
