"""The advisories of one session: what was found goes in, what is stored goes out. The session runs it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from common.chain import Chain
from common.clock import NS_PER_S, Clock
from common.jetstream.client import FloeClient
from egress.advisories.advisory import Writer, inspect_field
from egress.advisories.event import Advisory
from egress.advisories.lateness import Lateness
from egress.advisories.message import Letters
from egress.advisories.plain import PlainSender
from egress.advisories.senders import ACK_TIMEOUT, ReliableSender
from egress.advisories.tally import Tally
from egress.backoff import Backoff
from egress.partition import Slice


class Advisories:
    """Publishes the advisories of `chain`. Made only where `part.settings.advisory.subject` is set.

    `outbox`: what a snapshot says is not stored yet; `doubtful`: whether some of it may have been sent since.
    `may_send`: asked before anything is sent, such as whether the lease is usable. `ack_timeout`: seconds.
    """

    def __init__(
        self,
        part: Slice,
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
        feed = part.settings
        letters = Letters(feed.advisory.subject, Writer(chain, inspect_field(feed)))
        tally = Tally(chain, feed.advisory.subject)
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
