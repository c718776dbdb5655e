"""Reads what a target holds, headers only: which chains' messages stand there, and how many it let go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from common.chain import Chain
from common.errors import OutcomeUnknown
from common.jetstream.api import create_consumer, delete_consumer, next_message, parse_ack
from common.jetstream.client import FloeClient, frame
from common.jetstream.headers import restore, status
from common.tasks import Trouble

BATCH = 5_000  # messages of one pull request
PATIENCE = 10.0  # seconds without a message before the reading is given up


@dataclass(slots=True)
class ScannedChain:
    """What of a chain stands in the stretch that was read.

    `first`, `newest`: least and greatest sequence found, `count`: messages; `at`: target sequence of the
    newest; `before`: messages of any kind that were read up to and including it.
    """

    first: int
    newest: int
    count: int
    at: int
    before: int


@dataclass(slots=True)
class TargetScan:
    """What stands in a target behind sequence `after`, up to and including `last`.

    `held`: messages of any kind, `foreign`: those of them without provenance, `others`: those with one that
    `counts` does not take (None: it takes all).
    """

    after: int
    last: int
    counts: Callable[[Chain, int], bool] | None = None
    held: int = 0
    foreign: int = 0
    others: int = 0
    chains: dict[Chain, ScannedChain] = field(default_factory=dict)

    @property
    def gone(self) -> int:
        """How many messages of the stretch cannot be read any more."""
        return max(0, self.last - self.after) - self.held

    def gone_behind(self, chain: Chain) -> int:
        """How many of them stood behind the chain's newest: some may have been newer ones of the chain."""
        standing = self.chains.get(chain)
        if standing is None:
            return self.gone
        return self.last - standing.at - (self.held - standing.before)

    def add(self, at: int, headers: bytes | None) -> None:
        """One more message, which stands at target sequence `at`, ascending."""
        self.held += 1
        provenance, _ = restore(headers)
        try:
            if provenance is not None:
                self._count(provenance.chain, provenance.sequence, at)
                return
        except ValueError:  # its words name no chain
            pass
        self.foreign += 1

    def _count(self, chain: Chain, sequence: int, at: int) -> None:
        if self.counts is not None and not self.counts(chain, sequence):
            self.others += 1
            return
        standing = self.chains.get(chain)
        if standing is None:
            self.chains[chain] = ScannedChain(sequence, sequence, 1, at, self.held)
            return
        standing.count += 1
        standing.first = min(standing.first, sequence)
        if sequence >= standing.newest:
            standing.newest, standing.at, standing.before = sequence, at, self.held


async def take_census(client: FloeClient, stream: str, retention: str, census: TargetScan) -> TargetScan:
    """Read the messages of `stream` that `census` is about.

    `retention`: the stream's; a work queue allows no second consumer, so it is asked message by message.
    Raises OutcomeUnknown where it does not answer, ApiError.
    """
    if census.last <= census.after:
        return census
    if retention == "limits":
        await _read(client, stream, census)
    else:
        await _ask(client, stream, census)
    return census


async def _ask(client: FloeClient, stream: str, census: TargetScan) -> None:
    at = census.after + 1
    while at <= census.last:
        message = await next_message(client, stream, at)
        if message is None or message.sequence > census.last:
            return
        census.add(message.sequence, message.headers)
        at = message.sequence + 1


async def _read(client: FloeClient, stream: str, census: TargetScan) -> None:
    pull = _Pull(census)
    inbox = client.new_inbox()
    subscription = await client.subscribe_raw(inbox, pull.sink, pull.trouble.tell)
    consumer = await create_consumer(
        client,
        stream,
        {
            "name": f"floe_{inbox.rpartition('.')[2]}",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": census.after + 1,
            "ack_policy": "none",
            "headers_only": True,
            "mem_storage": True,
            "inactive_threshold": 30 * 10**9,
        },
    )
    subject = client.api_subject(f"CONSUMER.MSG.NEXT.{stream}.{consumer.name}").encode()
    request = json.dumps({"batch": BATCH, "expires": int(PATIENCE * 1e9)}).encode()
    try:
        pull.is_done = consumer.pending == 0
        while not pull.is_done:
            client.send(frame(subject, request, None, inbox.encode()))
            await pull.all_of_one()
    finally:
        await subscription.unsubscribe()
        await delete_consumer(client, stream, consumer.name)


class _Pull:
    """Hands what one pull request after the other delivers to a census."""

    def __init__(self, census: TargetScan) -> None:
        self._census, self._left, self._moved = census, BATCH, asyncio.Event()
        self.trouble = Trouble(self._moved)
        self.is_done = False

    def sink(self, _subject: bytes, reply: bytes, _payload: bytes, headers: bytes | None) -> None:
        self._moved.set()
        if not reply.startswith(b"$JS.ACK."):
            if status(headers):
                self._left = 0  # the request ended without more messages
            return
        self._left -= 1
        ack = parse_ack(reply)
        if ack.stream_sequence <= self._census.last:
            self._census.add(ack.stream_sequence, headers)
        self.is_done = self.is_done or ack.pending == 0 or ack.stream_sequence >= self._census.last

    async def all_of_one(self) -> None:
        """Until everything of one request came.

        Raises OutcomeUnknown where nothing more comes, and what counting raised.
        """
        self._left, before = BATCH, self._census.held
        while self._left > 0 and not self.is_done:
            self._moved.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), PATIENCE)
            self.trouble.check()
            if not self._moved.is_set():
                break
        if not self.is_done and self._census.held == before:
            raise OutcomeUnknown(f"target: no message within {PATIENCE:g} s, {before} were read")
