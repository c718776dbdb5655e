"""Senders of the advisories of one chain: reliable, until a stream has stored each, or plain, once."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

from common.chain import Chain
from common.clock import NS_PER_S, Backoff, Clock
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.nats.client import FloeClient
from common.nats.headers import build_block
from common.nats.protocol import frame
from common.nats.requests import ApiError
from common.tasks import wait_for
from egress.advisories import outbox as limits
from egress.advisories.advisory import Advisory, advisory_subject, build_document, event_id, key_name, subject_filter
from egress.advisories.outbox import AdvisoryReport, LatenessCheck, Outbox, SendResult, find_stored_ids, parse_ack
from egress.partition import Partition

ADVISORY_ACK_TIMEOUT_S = 5.0  # seconds
SEND_CHECK_INTERVAL_S = 0.5  # seconds between checks of conditions that have no event
PROBE_ADVISORIES = 4  # sent at once while the permission to send is missing: the connection logs each subject
IDS_PER_TURN = 1000  # made in one turn of the event loop


@dataclass(eq=False)
class AdvisorySender:
    """The plain sender of the advisories of `chain`: publishes each once, as soon as it can; drops and counts them
    while the connection is down. Made only if `partition.settings.advisory.subject` is set.

    `outbox`: the advisories that a snapshot holds as not stored yet; some may have been sent since. `may_send`:
    called before each send, such as to check that the lease is usable. `ack_timeout_s`: seconds.
    """

    partition: Partition
    chain: Chain
    client: FloeClient
    clock: Clock
    rng: random.Random
    outbox: InitVar[Sequence[Advisory]] = ()
    may_send: Callable[[], bool] = lambda: True
    ack_timeout_s: float = ADVISORY_ACK_TIMEOUT_S

    def __post_init__(self, outbox: Sequence[Advisory]) -> None:
        feed = self.partition.settings
        self._template = feed.advisory.subject
        self._report = AdvisoryReport(self.chain, self._template)
        duration_ns = round(feed.inspect_duration * NS_PER_S)
        self._lateness = LatenessCheck(self.client, feed.stream, duration_ns, self.clock)
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._queue: deque[Advisory] = deque()

    def enqueue(self, advisories: Sequence[Advisory], *, may_be_sent: bool) -> None:
        """Send these, in this order for each value. Called from the event loop; never waits, never refuses.

        `may_be_sent`: found while messages are read a second time, so they may have been sent.
        """
        if may_be_sent:
            return
        room = limits.MAX_WAITING_ADVISORIES - len(self._queue)
        self._queue.extend(advisories[:room])
        for advisory in advisories[room:]:
            self._report.count(advisory, SendResult.DROPPED)
        if self._queue:
            self._idle.clear()
        self._wake.set()

    def finish_reread(self) -> None:
        """End the second reading: look up the doubtful advisories in the stream, and send those that are not there."""

    @property
    def has_room(self) -> bool:
        """True if the reader may request more messages; False while too many wait to be stored (stop, don't skip).

        Check it at each tick: there is no event for it.
        """
        return True

    def pending(self) -> tuple[Advisory, ...]:
        """Return those not known to be stored, including those in flight, for snapshots. Empty if not reliable."""
        return ()

    async def run(self) -> None:
        """Send until cancelled. Raises nothing for errors of servers. May be cancelled anywhere."""
        while True:
            self._wake.clear()
            while self._queue and self.may_send():
                await self._send([self._queue.popleft() for _ in range(min(limits.MAX_IN_FLIGHT, len(self._queue)))])
            if not self._queue:
                self._idle.set()
            await wait_for(self._wake, SEND_CHECK_INTERVAL_S)

    async def drain(self, timeout: float) -> None:
        """Wait until nothing is queued, sending fails, or `timeout` seconds have passed. `run` must be running."""
        await wait_for(self._idle, timeout)

    async def _send(self, batch: list[Advisory]) -> None:
        try:
            late = await self._lateness.find_late(batch)
        except FloeError:
            late = set()
        frames: dict[Advisory, bytes] = {}
        for advisory in [each for each in batch if each not in late]:
            try:
                frames[advisory] = frame(*self._build_message(advisory))
            except ValueError as error:
                self._report.record_dropped(advisory, error)
        try:
            self.client.send(b"".join(frames.values()))
            await self.client.flush_writes()
            result = SendResult.PUBLISHED
        except Unavailable:
            result = SendResult.DROPPED
        for advisory in late:
            self._report.count(advisory, SendResult.STALE)
        for advisory in frames:
            self._report.count(advisory, result)

    def _build_message(self, advisory: Advisory) -> tuple[bytes, bytes, bytes]:
        """Return the subject, the payload, and headers with the id by which the stream recognises a duplicate.

        Raises ValueError if it exceeds the server's limit: the server would refuse it and close the connection.
        """
        document = build_document(self.chain, key_name(self.partition.settings), advisory)
        payload, headers = document.to_json(), build_block([b"Nats-Msg-Id: " + document.event_id.encode()])
        if (size := len(headers) + len(payload)) > self.client.max_payload:
            raise ValueError(f"expected at most {self.client.max_payload} bytes, found {size}")
        return advisory_subject(self._template, advisory).encode(), payload, headers


class ReliableSender(AdvisorySender):
    """The sender of an outbox: for each value one advisory at a time, over all values a wave at a time.

    A lost answer makes an advisory doubtful. A doubtful one is looked up in the stream, and sent if it is not there.
    Only late advisories and those that the server would refuse are dropped.
    """

    def __post_init__(self, outbox: Sequence[Advisory]) -> None:
        super().__post_init__(outbox)
        self._backoff, self._outbox = Backoff(self.rng), Outbox()
        self._failed: set[Advisory] = set()
        self._is_reread_finished, self._is_compared, self._batch_limit = False, True, limits.MAX_IN_FLIGHT
        self.enqueue(outbox, may_be_sent=True)

    # Incoming

    def enqueue(self, advisories: Sequence[Advisory], *, may_be_sent: bool) -> None:
        self._outbox.add(advisories, doubtful=may_be_sent)
        self._update_waiting()

    def finish_reread(self) -> None:
        self._is_reread_finished = True
        self._update_waiting()

    @property
    def has_room(self) -> bool:
        return self._outbox.has_room

    def pending(self) -> tuple[Advisory, ...]:
        return self._outbox.pending()

    def _update_waiting(self) -> None:
        count = len(self._outbox)
        self._report.set_waiting(count)
        if count:
            self._idle.clear()
        else:
            self._idle.set()
        self._wake.set()

    # Sending

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                did_work = self.may_send() and self.client.is_up and await self._step()
            except FloeError as error:
                # A lost connection is reported elsewhere; an advisory with a lost answer is looked up next.
                if self.client.is_up and not isinstance(error, OutcomeUnknown):
                    self._report.record_failure(error)
                await self.clock.sleep(self._backoff.next_delay())
            else:
                if not did_work:
                    await wait_for(self._wake, SEND_CHECK_INTERVAL_S)

    async def drain(self, timeout: float) -> None:
        deadline = self.clock.monotonic() + timeout
        while not (self._idle.is_set() or self._report.failing_code) and self.clock.monotonic() < deadline:
            await wait_for(self._idle, min(0.05, timeout))

    async def _step(self) -> bool:
        """Compare or send once. Return False if there is nothing to do."""
        outbox = self._outbox
        if outbox.doubtful and (self._is_reread_finished or not outbox.has_room):
            await self._resolve_doubtful(list(outbox.doubtful))
        elif batch := outbox.next_batch(self._batch_limit):
            await self._send(await self._drop_late(batch))
        else:
            return False
        self._backoff.reset()
        if not self._failed:
            self._report.record_recovery()
        return True

    async def _drop_late(self, advisories: list[Advisory]) -> list[Advisory]:
        late = await self._lateness.find_late(advisories)
        for advisory in late:
            self._remove(advisory, SendResult.STALE)
        return [each for each in advisories if each not in late]

    async def _send(self, batch: list[Advisory]) -> None:
        errors = await asyncio.gather(*map(self._send_one, batch))
        self._update_waiting()
        failures = [error for error in errors if error is not None]
        refused = sum(isinstance(error, Refused) for error in failures)
        self._batch_limit = PROBE_ADVISORIES if refused and refused == len(batch) else limits.MAX_IN_FLIGHT
        if failures:
            raise failures[0]

    async def _send_one(self, advisory: Advisory) -> FloeError | None:
        """Send one advisory. Return the error if it may not be stored; None if it is stored or was dropped."""
        try:
            subject, payload, headers = self._build_message(advisory)
            answer, _ = await self.client.request_raw(subject, payload, headers, timeout=self.ack_timeout_s)
            self._remove(advisory, parse_ack(subject.decode(), answer))
        except FloeError as error:
            is_unknown = isinstance(error, OutcomeUnknown)
            self._report.count(advisory, SendResult.UNKNOWN if is_unknown else SendResult.FAILED)
            self._outbox.requeue(advisory, doubtful=is_unknown)
            self._failed.add(advisory)
            return error
        except ValueError as error:
            self._report.record_dropped(advisory, error)
            self._forget(advisory)
        return None

    # Doubtful advisories

    async def _resolve_doubtful(self, doubtful: list[Advisory]) -> None:
        advisories, wanted = await self._drop_late(doubtful), dict[str, Advisory]()
        for start in range(0, len(advisories), IDS_PER_TURN):
            some = advisories[start : start + IDS_PER_TURN]
            wanted |= {event_id(self.chain, each): each for each in some}
            await asyncio.sleep(0)  # lets reading continue
        if wanted:
            for event in await self._find_stored(wanted):
                self._remove(wanted.pop(event), SendResult.STORED)
        self._outbox.mark_not_stored(wanted.values())
        self._update_waiting()

    async def _find_stored(self, wanted: dict[str, Advisory]) -> set[str]:
        """Return the ids that are stored; empty if no stream is visible and readable. Raises Unavailable: retry."""
        subject, least_ns = subject_filter(self._template), min(each.event_time_ns for each in wanted.values())
        reason = f"no stream with {subject} is visible"
        try:
            found = await find_stored_ids(self.client, subject, set(wanted), least_ns)
        except (ApiError, Refused) as error:
            found, reason = None, error.message
        if found is None and self._is_compared:
            self._report.warn_not_compared(reason)
        self._is_compared = found is not None
        return found or set()

    # Outcomes

    def _remove(self, advisory: Advisory, result: SendResult) -> None:
        self._report.count(advisory, result)
        self._forget(advisory)

    def _forget(self, advisory: Advisory) -> None:
        self._outbox.remove(advisory)
        self._failed.discard(advisory)


def sender_class(partition: Partition) -> type[AdvisorySender]:
    return ReliableSender if partition.settings.advisory.reliable else AdvisorySender
