"""Captures of a stream's configuration, consumers and deletions, made by the holder of partition 0.

    read the consumers → read the stream → check that it is the same → read the archive's end → put the differences

The configuration is put if it differs from the newest capture. Consumers are put if a declared setting differs; else,
if a position moved, once the newest capture is old enough, or at the drain. Deletions are put if they differ; they are
also read at each change of the configuration. Pure functions decide which captures to put. A capture that fails never
stops the archiving: it is logged and retried. Documents: `common.archive.captures`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from common.archive.captures import (
    CAPTURE_KINDS,
    CONFIG,
    CONSUMERS,
    DELETIONS,
    Captured,
    CapturedConfig,
    CapturedConsumer,
    CapturedConsumers,
    CapturedDeletions,
    CaptureStore,
    CaptureT,
    deleted_ranges,
    to_json,
    with_chain_name,
)
from common.clock import NS_PER_S, format_time, parse_time, sleep_in_step
from common.errors import DataError, FloeError
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import StreamInfo, deleted_sequences, list_consumers, stream_info
from common.nats.lease import Lease
from common.settings.types import format_count
from egress import metrics
from egress.archive import Archive
from egress.deps import PartitionDeps
from egress.partition import is_floe_consumer

log = get_logger(__name__)

DRAIN_TIMEOUT_S = 5.0  # seconds that the last capture may take


# Decisions. Pure.


def config_differs(newest: CapturedConfig | None, found: CapturedConfig) -> bool:
    return newest is None or (newest.config, newest.created) != (found.config, found.created)


def are_consumers_due(newest: CapturedConsumers | None, found: CapturedConsumers, period: float, drain: bool) -> bool:
    """True if the consumers are to be put. `period`: seconds between two captures of which only positions differ.

    Ephemeral consumers come and go, so their configuration counts as a position.
    """
    if newest is None or _declared(newest) != _declared(found):
        return True
    if newest.consumers == found.consumers:
        return False
    age = (parse_time(found.at) - parse_time(newest.at)) / NS_PER_S
    return drain or not 0 <= age < period


def _declared(captured: CapturedConsumers) -> list[tuple[dict[str, Any], str, bool]]:
    return [each.declared for each in captured.consumers if each.config.get("durable_name")]


def deletions_differ(newest: CapturedDeletions | None, found: CapturedDeletions) -> bool:
    """True if the deletions or the first sequence differ. New messages alone are no difference: none is deleted."""
    return newest is None or (newest.first, newest.deleted) != (found.first, found.deleted)


def captured_consumers(answers: Sequence[dict[str, Any]]) -> tuple[CapturedConsumer, ...]:
    """Return the consumers except Floe's own, by name, from the answer of CONSUMER.LIST. Raises DataError."""
    try:
        found = [_captured(each) for each in answers if not is_floe_consumer(each["name"])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"CONSUMER.LIST: expected consumers, found {error!r:.200}") from None
    return tuple(sorted(found, key=lambda each: each.name))


def _captured(answer: dict[str, Any]) -> CapturedConsumer:
    delivered, floor = answer.get("delivered") or {}, answer.get("ack_floor") or {}
    return CapturedConsumer(
        config={"name": answer["name"], **answer["config"]},
        created=answer["created"],
        delivered_consumer=delivered.get("consumer_seq", 0),
        delivered_stream=delivered.get("stream_seq", 0),
        ack_floor_consumer=floor.get("consumer_seq", 0),
        ack_floor_stream=floor.get("stream_seq", 0),
        ack_pending=answer.get("num_ack_pending", 0),
        redelivered=answer.get("num_redelivered", 0),
        paused=answer.get("paused", False) is True,
    )


def fits_payload(info: StreamInfo, max_payload: int) -> bool:
    """True if the deleted sequences take at most half of a message of `max_payload` bytes in the server's answer."""
    return info.deleted * (len(str(info.last_sequence)) + 1) <= max_payload // 2


def check_size(info: StreamInfo, max_payload: int) -> None:
    """Raise DataError if the deleted sequences do not fit (`fits_payload`)."""
    if not fits_payload(info, max_payload):
        raise DataError(
            f"stream {info.name}: expected no more deleted messages than fit into {max_payload} bytes, found "
            f"{format_count(info.deleted, 'deleted message')}",
            hint="they are not captured; to stop the attempts, set `capture_deletes: never`",
            code="E-NATS-PAYLOAD",
        )


class StreamCapturer:
    """Captures of a partition's stream, put into the incarnation of `archive`. `created`: of the stream that was
    identified as the archive's.
    """

    def __init__(self, deps: PartitionDeps, archive: Archive, created: str, lease: Lease) -> None:
        self._deps, self._partition, self._clock = deps, deps.partition, deps.clock
        self._archive, self._created, self._lease = archive, created, lease
        self._store = CaptureStore(deps.chains.layout, deps.chains.objects)
        chain = deps.partition.chain
        self._labels = chain.site, chain.feed, str(chain.partition)
        self._error_codes: dict[str, str] = {}  # the kinds that fail, and the code of the error that was logged
        self._newest: dict[type[Captured], Captured | None] = {}  # filled at the first read
        self._unchanged_until: int | None = None  # last sequence when the configuration equalled its newest capture
        self._due = {CONSUMERS: -math.inf, DELETIONS: -math.inf}  # by the monotonic clock

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await self._capture()
            await sleep_in_step(self._clock, self._pause)

    @property
    def _pause(self) -> float:
        """Seconds until the next check: a period may be shorter than the pace of checks."""
        settings = self._partition.settings
        # Without a key, the stream's retention may set a period, which is longer than the pace.
        periods = settings.capture_consumers_s, settings.capture_deletes_s("")
        return min(filter(None, (self._deps.tuning.intervals.check, *periods)))

    async def drain(self) -> None:
        """Capture once more after all segments are put, for at most DRAIN_TIMEOUT_S seconds, unless the incarnation
        has ended.
        """
        with suppress(TimeoutError), self._report_errors(CONFIG):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                if not await self._archive.has_successor():
                    await self._capture(draining=True)

    async def _capture(self, *, draining: bool = False) -> None:
        client, settings, stream = self._deps.client, self._partition.settings, self._partition.stream
        if not client.is_up:
            return
        # Before the end of the archive is read, so that no capture is older than its name claims.
        consumers: tuple[CapturedConsumer, ...] | None = None
        if self._is_due(CONSUMERS, settings.capture_consumers_s, draining):
            with self._report_errors(CONSUMERS):
                consumers = captured_consumers(await list_consumers(client, stream))
        info: StreamInfo | None = None
        is_changed = False
        with self._report_errors(CONFIG):
            info = await stream_info(client, stream)
            is_changed = info is not None and await self._is_changed(info)
        if info is None or not self._is_same(info):
            return
        deleted: Sequence[int] | None = None
        retention = str(info.config.get("retention", ""))
        if self._is_due(DELETIONS, settings.capture_deletes_s(retention), draining) or is_changed:
            with self._report_errors(DELETIONS):
                check_size(info, client.max_payload)
                answer = await deleted_sequences(client, stream)
                if answer is None or not self._is_same(answer[0]):
                    return
                info, deleted = answer
                if is_changed:
                    self._newest[CapturedDeletions] = None  # put in any case: it records the state at the change
        await self._write(info, consumers, deleted, draining=draining)

    def _is_due(self, kind: str, period: float, draining: bool) -> bool:
        now = self._clock.monotonic()
        if not period or (now < self._due[kind] and not draining):
            return False
        self._due[kind] = now + period
        return True

    async def _is_changed(self, info: StreamInfo) -> bool:
        """True if the configuration changed and the deletions can be captured with it. Messages that a limit dropped
        before it was raised leave no other trace.
        """
        newest, is_wanted = await self._newest_of(CapturedConfig), self._partition.settings.capture_deletes != "never"
        is_wanted = is_wanted and fits_payload(info, self._deps.client.max_payload)
        return is_wanted and newest is not None and newest.config != info.config

    def _is_same(self, info: StreamInfo) -> bool:
        """True unless the stream was recreated or set back, and the session has not judged it yet."""
        return info.created == self._created and info.last_sequence >= self._archive.end

    async def _write(
        self,
        info: StreamInfo,
        consumers: tuple[CapturedConsumer, ...] | None,
        deleted: Sequence[int] | None,
        *,
        draining: bool,
    ) -> None:
        end, at, ts = self._archive.end, format_time(round(self._clock.now() * 1000) * 1_000_000), info.time
        with self._report_errors(CONFIG):
            held = info.first_sequence, info.last_sequence, info.messages
            config = CapturedConfig(at, end, info.created, info.config, *held, self._unchanged_until, ts=ts)
            await self._put(config, is_due=config_differs(await self._newest_of(CapturedConfig), config))
            if not config_differs(await self._newest_of(CapturedConfig), config):
                self._unchanged_until = info.last_sequence
        if consumers is not None:
            with self._report_errors(CONSUMERS):
                found = CapturedConsumers(at, end, consumers, ts=ts)
                known = await self._newest_of(CapturedConsumers)
                period = self._deps.tuning.intervals.consumers_capture
                await self._put(found, is_due=are_consumers_due(known, found, period, draining))
        if deleted is not None:
            with self._report_errors(DELETIONS):
                first, last = info.first_sequence, info.last_sequence
                gone = CapturedDeletions(at, end, first, last, deleted_ranges(deleted), ts=ts)
                await self._put(gone, is_due=deletions_differ(await self._newest_of(CapturedDeletions), gone))

    async def _newest_of(self, kind: type[CaptureT]) -> CaptureT | None:
        """Return the newest capture. None if there is none, or if it is damaged: another then follows it."""
        if kind not in self._newest:
            try:
                found = await self._deps.pools.io.run(self._store.newest, kind, self._archive.chain)
            except DataError as error:
                log.warning("capture ignored", action="capture_ignored", error=str(error))
                found = None
            self._newest[kind] = found
        newest = self._newest[kind]
        return newest if isinstance(newest, kind) else None

    async def _put(self, document: Captured, *, is_due: bool) -> None:
        kind = CAPTURE_KINDS[type(document)]
        if is_due:
            if not self._lease.is_usable():
                return
            failpoint("egress.before_capture")
            await self._deps.pools.io.run(self._store.put, self._archive.chain, document)
            self._newest[type(document)] = document
            size = len(to_json(with_chain_name(self._archive.chain, document)))
            metrics.captures.labels(*self._labels, kind, "written").inc()
            metrics.capture_bytes.labels(*self._labels).inc(size)
            context = {"what": kind, "end": document.end, "bytes": size, **self._archive.chain.log_context()}
            log.debug("capture written", action="capture_written", **context)
        metrics.capture_done.labels(*self._labels, kind).set(self._clock.now())
        if self._error_codes.pop(kind, None) is not None:
            log.info("capture recovered", action="capture_recovered", what=kind, **self._archive.chain.log_context())

    @contextmanager
    def _report_errors(self, kind: str) -> Iterator[None]:
        """Count an error of the server or the store, and log it once for each code until the capture succeeds."""
        try:
            yield
        except (FloeError, ValueError) as failure:
            error = failure if isinstance(failure, FloeError) else DataError(f"answer of the server: {failure}")
            metrics.captures.labels(*self._labels, kind, "failed").inc()
            if self._error_codes.get(kind) != error.code:
                self._error_codes[kind] = code = error.code
                context = {"what": kind, "code": code, "error": str(error), **self._archive.chain.log_context()}
                log.warning("capture failed", action="capture_failed", **context)
