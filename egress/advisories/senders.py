"""Sends advisories until a stream has stored them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence

from common.chain import Chain
from common.clock import NS_PER_S, Backoff, Clock
from common.errors import FloeError, OutcomeUnknown, Refused, Unavailable
from common.jetstream.client import FloeClient
from common.jetstream.requests import ApiError
from common.tasks import wait_for
from egress.advisories.advisory import Advisory, Letters, Writer, event_id, filter_of, inspect_field
from egress.advisories.outbox import (
    LIMIT,
    WAVE,
    AdvisoryTally,
    Lateness,
    Outbox,
    SendResult,
    ids_stored,
    judge_ack,
)
from egress.partition import Partition

ACK_TIMEOUT = 5.0  # seconds
TICK = 0.5  # seconds between looks at what nobody wakes us for
PROBE = 4  # advisories sent at once where the right to send is missing: the connection logs each subject
IDS_AT_ONCE = 1000  # made in one turn of the event loop


class ReliableSender:
    """Sends what is in its outbox: of each value one at a time, of all values a wave at a time.

    An answer that is lost makes an advisory doubtful. What is doubtful is looked for in the stream, and sent
    if it is not there. Nothing is given up but what comes too late.
    """

    def __init__(
        self,
        client: FloeClient,
        letters: Letters,
        tally: AdvisoryTally,
        lateness: Lateness,
        clock: Clock,
        backoff: Backoff,
        may_send: Callable[[], bool],
        ack_timeout: float,
    ) -> None:
        self._client, self._letters, self._tally = client, letters, tally
        self._lateness, self._clock, self._backoff, self._may_send = lateness, clock, backoff, may_send
        self._ack_timeout = ack_timeout
        self._outbox = Outbox()
        self._failed: set[Advisory] = set()
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._is_settled, self._is_compared, self._most = False, True, WAVE
        self._idle.set()

    # What comes in

    def take(self, advisories: Sequence[Advisory], *, doubtful: bool) -> None:
        """Send these too, in order for each value; those that are `doubtful` if they are not stored."""
        self._outbox.add(advisories, doubtful=doubtful)
        self._changed()

    def settle(self) -> None:
        """Nothing doubtful comes any more: it can be looked for now."""
        self._is_settled = True
        self._changed()

    @property
    def has_room(self) -> bool:
        """Whether the outbox can take what one more pull request may bring."""
        return self._outbox.has_room

    def pending(self) -> tuple[Advisory, ...]:
        """Everything not known to be stored."""
        return self._outbox.pending()

    def _changed(self) -> None:
        count = len(self._outbox)
        self._tally.waiting(count)
        if count:
            self._idle.clear()
        else:
            self._idle.set()
        self._wake.set()

    # Sending

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            try:
                went_on = self._may_send() and self._client.is_up and await self._step()
            except FloeError as error:
                await self._fail(error)
            else:
                if not went_on:
                    await wait_for(self._wake, TICK)

    async def drain(self, timeout: float) -> None:
        """Return when nothing waits, sending fails, or `timeout` seconds have passed."""
        deadline = self._clock.monotonic() + timeout
        while not (self._idle.is_set() or self._tally.is_failing) and self._clock.monotonic() < deadline:
            await wait_for(self._idle, min(0.05, timeout))

    async def _step(self) -> bool:
        """Do what is next; False where there is nothing to do."""
        outbox = self._outbox
        if outbox.doubtful and (self._is_settled or not outbox.has_room):
            await self._compare(list(outbox.doubtful))
        elif wave := outbox.wave(self._most):
            await self._send(await self._without_late(wave))
        else:
            return False
        self._backoff.reset()
        if not self._failed:
            self._tally.works()
        return True

    async def _without_late(self, advisories: list[Advisory]) -> list[Advisory]:
        late = await self._lateness.late(advisories)
        for advisory in late:
            self._remove(advisory, SendResult.STALE)
        return [each for each in advisories if each not in late]

    async def _send(self, wave: list[Advisory]) -> None:
        errors = await asyncio.gather(*map(self._send_one, wave))
        self._changed()
        failures = [error for error in errors if error is not None]
        refused = sum(isinstance(error, Refused) for error in failures)
        self._most = PROBE if refused and refused == len(wave) else WAVE
        if failures:
            raise failures[0]

    async def _send_one(self, advisory: Advisory) -> FloeError | None:
        """Send it and note what became of it; why not, where it is not stored."""
        try:
            result = await self._ask_to_store(advisory)
        except FloeError as error:
            is_unknown = isinstance(error, OutcomeUnknown)
            self._tally.count(advisory, SendResult.UNKNOWN if is_unknown else SendResult.FAILED)
            self._outbox.put_back(advisory, doubtful=is_unknown)
            self._failed.add(advisory)
            return error
        except ValueError as error:
            self._tally.refused(advisory, error)
            self._forget(advisory)
            return None
        self._remove(advisory, result)
        return None

    async def _ask_to_store(self, advisory: Advisory) -> SendResult:
        message = self._letters.message(advisory).checked(self._client.max_payload)
        answer, _ = await self._client.request_raw(
            message.subject, message.payload, message.headers, timeout=self._ack_timeout
        )
        return judge_ack(message.subject.decode(), answer)

    # What may have been sent

    async def _compare(self, doubtful: list[Advisory]) -> None:
        """Leave out what the stream holds; the rest may be sent."""
        wanted = await self._by_id(await self._without_late(doubtful))
        if wanted:
            for event in await self._stored(wanted):
                self._remove(wanted.pop(event), SendResult.STORED)
        self._outbox.trust(wanted.values())
        self._changed()

    async def _by_id(self, advisories: list[Advisory]) -> dict[str, Advisory]:
        found: dict[str, Advisory] = {}
        for start in range(0, len(advisories), IDS_AT_ONCE):
            partition = advisories[start : start + IDS_AT_ONCE]
            found |= {event_id(self._letters.writer.chain, each): each for each in partition}
            await asyncio.sleep(0)  # reading goes on meanwhile
        return found

    async def _stored(self, wanted: dict[str, Advisory]) -> set[str]:
        """The ids that are stored; none where nobody can say. Raises Unavailable where it is to be asked
        again.
        """
        least_ns = min(each.moment_ns for each in wanted.values())
        try:
            found = await ids_stored(self._client, filter_of(self._letters.template), set(wanted), least_ns)
        except (ApiError, Refused) as error:
            found, why = None, error.message
        else:
            why = f"no stream with {filter_of(self._letters.template)} is seen"
        if found is None and self._is_compared:
            self._tally.not_compared(why)
        self._is_compared = found is not None
        return found or set()

    # What became of it

    async def _fail(self, error: FloeError) -> None:
        # A line that is down is told elsewhere; a lost answer is looked for next.
        if self._client.is_up and not isinstance(error, OutcomeUnknown):
            self._tally.fails(error)
        await self._clock.sleep(self._backoff.next())

    def _remove(self, advisory: Advisory, result: SendResult) -> None:
        self._tally.count(advisory, result)
        self._forget(advisory)

    def _forget(self, advisory: Advisory) -> None:
        self._outbox.remove(advisory)
        self._failed.discard(advisory)


class PlainSender:
    """Sends what it takes as soon as it can; drops it, and counts it, where the connection is down."""

    def __init__(
        self,
        client: FloeClient,
        letters: Letters,
        tally: AdvisoryTally,
        lateness: Lateness,
        clock: Clock,
        may_send: Callable[[], bool],
    ) -> None:
        self._client, self._letters, self._tally = client, letters, tally
        self._lateness, self._clock, self._may_send = lateness, clock, may_send
        self._queue: deque[Advisory] = deque()
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def take(self, advisories: Sequence[Advisory], *, doubtful: bool) -> None:
        """Send these too, unless they may have been sent already."""
        if doubtful:
            return
        room = LIMIT - len(self._queue)
        self._queue.extend(advisories[:room])
        for advisory in advisories[room:]:
            self._tally.count(advisory, SendResult.DROPPED)
        if self._queue:
            self._idle.clear()
        self._wake.set()

    def settle(self) -> None:
        """Nothing waits for it."""

    @property
    def has_room(self) -> bool:
        """Always: what does not fit is dropped."""
        return True

    def pending(self) -> tuple[Advisory, ...]:
        """Nothing is owed to anybody."""
        return ()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            while self._queue and self._may_send():
                await self._send([self._queue.popleft() for _ in range(min(WAVE, len(self._queue)))])
            if not self._queue:
                self._idle.set()
            await wait_for(self._wake, TICK)

    async def drain(self, timeout: float) -> None:
        """Return when nothing waits, or after `timeout` seconds."""
        await wait_for(self._idle, timeout)

    async def _send(self, wave: list[Advisory]) -> None:
        late = await self._late(wave)
        frames = {each: frame for each in wave if each not in late and (frame := self._frame(each))}
        try:
            self._client.send(b"".join(frames.values()))
            await self._client.flush_writes()
            result = SendResult.PUBLISHED
        except Unavailable:
            result = SendResult.DROPPED
        for advisory in frames:
            self._tally.count(advisory, result)
        for advisory in late:
            self._tally.count(advisory, SendResult.STALE)

    def _frame(self, advisory: Advisory) -> bytes:
        """Empty for what can never be sent."""
        try:
            return self._letters.message(advisory).checked(self._client.max_payload).frame()
        except ValueError as error:
            self._tally.refused(advisory, error)
            return b""

    async def _late(self, wave: list[Advisory]) -> set[Advisory]:
        try:
            return await self._lateness.late(wave)
        except FloeError:
            return set()


class Advisories:
    """Publishes the advisories of `chain`. Made only where `partition.settings.advisory.subject` is set.

    `outbox`: what a snapshot says is not stored yet; `doubtful`: whether some of it may have been sent since.
    `may_send`: asked before anything is sent, such as whether the lease is usable. `ack_timeout`: seconds.
    """

    def __init__(
        self,
        partition: Partition,
        chain: Chain,
        client: FloeClient,
        clock: Clock,
        rng: random.Random,
        *,
        outbox: Sequence[Advisory] = (),
        doubtful: bool = True,
        may_send: Callable[[], bool] = lambda: True,
        ack_timeout: float = ACK_TIMEOUT,
    ) -> None:
        feed = partition.settings
        letters = Letters(feed.advisory.subject, Writer(chain, inspect_field(feed)))
        tally = AdvisoryTally(chain, feed.advisory.subject)
        lateness = Lateness(client, feed.stream, round(feed.inspect_duration * NS_PER_S), clock)
        self._sender: ReliableSender | PlainSender
        if feed.advisory.reliable:
            self._sender = ReliableSender(
                client, letters, tally, lateness, clock, Backoff(rng), may_send, ack_timeout
            )
        else:
            self._sender = PlainSender(client, letters, tally, lateness, clock, may_send)
        self._sender.take(outbox, doubtful=doubtful)

    def take(self, advisories: Sequence[Advisory], *, again: bool) -> None:
        """Send these, in this order for each value. Called from the event loop; never waits, never refuses.

        `again`: found while reading again what was read before, so that they may have been sent.
        """
        if advisories:
            self._sender.take(advisories, doubtful=again)

    def settle(self) -> None:
        """Reading again has ended: what may have been sent is looked for in the stream, then sent."""
        self._sender.settle()

    @property
    def has_room(self) -> bool:
        """False while so many wait to be stored that the reader must ask for no more (stop, don't skip).

        To be asked again at each tick: room comes back by itself.
        """
        return self._sender.has_room

    def pending(self) -> tuple[Advisory, ...]:
        """Not known to be stored, those on their way included: goes into snapshots. Empty if not reliable."""
        return self._sender.pending()

    async def run(self) -> None:
        """Send until cancelled. Raises nothing for what servers do. May be cancelled anywhere."""
        await self._sender.run()

    async def drain(self, timeout: float) -> None:
        """Return when nothing waits, sending fails, or `timeout` seconds have passed; while `run` runs."""
        await self._sender.drain(timeout)
