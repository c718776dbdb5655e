"""Reads what a target holds, headers only: which chains' messages stand there, and how many it let go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.chain import Chain
from common.jetstream.api import next_message
from common.jetstream.client import FloeClient
from common.jetstream.headers import restore
from common.jetstream.pull import read_through


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
    Raises Unavailable where it does not answer, ApiError.
    """
    if census.last <= census.after:
        return census
    if retention == "limits":
        await read_through(
            client,
            stream,
            census.last,
            lambda message: census.add(message.sequence, message.headers),
            after=census.after,
            headers_only=True,
        )
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
