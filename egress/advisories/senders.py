"""Sends advisories until a stream has stored them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.clock import Clock, wait_for
from common.errors import FloeError, OutcomeUnknown, Refused
from common.jetstream.client import FloeClient
from common.jetstream.requests import ApiError
from egress.advisories.acks import judge_ack
from egress.advisories.advisory import event_id
from egress.advisories.event import Advisory
from egress.advisories.lateness import Lateness
from egress.advisories.message import Letters
from egress.advisories.outbox import WAVE, Outbox
from egress.advisories.stored import ids_stored
from egress.advisories.subject import filter_of
from egress.advisories.tally import Result, Tally
from egress.backoff import Backoff

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
        tally: Tally,
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
            self._remove(advisory, Result.STALE)
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
            self._tally.count(advisory, Result.UNKNOWN if is_unknown else Result.FAILED)
            self._outbox.put_back(advisory, doubtful=is_unknown)
            self._failed.add(advisory)
            return error
        except ValueError as error:
            self._tally.refused(advisory, error)
            self._forget(advisory)
            return None
        self._remove(advisory, result)
        return None

    async def _ask_to_store(self, advisory: Advisory) -> Result:
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
                self._remove(wanted.pop(event), Result.STORED)
        self._outbox.trust(wanted.values())
        self._changed()

    async def _by_id(self, advisories: list[Advisory]) -> dict[str, Advisory]:
        found: dict[str, Advisory] = {}
        for start in range(0, len(advisories), IDS_AT_ONCE):
            part = advisories[start : start + IDS_AT_ONCE]
            found |= {event_id(self._letters.writer.chain, each): each for each in part}
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

    def _remove(self, advisory: Advisory, result: Result) -> None:
        self._tally.count(advisory, result)
        self._forget(advisory)

    def _forget(self, advisory: Advisory) -> None:
        self._outbox.remove(advisory)
        self._failed.discard(advisory)
