"""Reads what a target holds, headers only: which chains' messages stand there, and how many it let go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from common.chain import Chain
from common.jetstream.api import next_message
from common.jetstream.client import FloeClient
from common.jetstream.pull import read_through
from common.segments.segment import Message
from ingress.verdict.verdict import Unread, origin_of

TOLD = 1000  # messages between two calls of `tell`


@dataclass(slots=True)
class ScannedChain:
    """What the stretch that was read holds of a chain.

    `first`, `newest`: least and greatest sequence found, `count`: messages; `at`: target sequence of the newest;
    `before`: messages of any kind that were read up to and including it.
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
    `counts` does not take (None: it takes all). `parked`: messages that were put aside; `parked_seen`: those
    of them that stand there, `parked_again`: how often one does that `counts` does not take. `tell`: called now
    and then, to say how far it is.
    """

    after: int
    last: int
    counts: Callable[[Chain, int], bool] | None = None
    parked: Collection[tuple[Chain, int]] = ()
    tell: Callable[[TargetScan], None] | None = None
    held: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    others: int = field(default=0, init=False)
    chains: dict[Chain, ScannedChain] = field(default_factory=dict, init=False)
    parked_seen: set[tuple[Chain, int]] = field(default_factory=set, init=False)
    parked_again: int = field(default=0, init=False)

    @property
    def gone(self) -> int:
        return max(0, self.last - self.after) - self.held

    @property
    def strangers(self) -> int:
        return self.others - self.parked_again

    def gone_behind(self, chain: Chain) -> int:
        """How many of them stood behind the chain's newest: some may have been newer messages of the chain."""
        if (scanned := self.chains.get(chain)) is None:
            return self.gone
        return self.last - scanned.at - (self.held - scanned.before)

    def add(self, at: int, headers: bytes | None) -> None:
        """`at`: target sequence of the message; call in ascending order."""
        self.held += 1
        if self.tell is not None and self.held % TOLD == 0:
            self.tell(self)
        origin = origin_of(headers)
        if isinstance(origin, Unread):
            self.foreign += 1
            return
        chain, sequence = origin.chain, origin.sequence
        is_counted = self.counts is None or self.counts(chain, sequence)
        if (chain, sequence) in self.parked:
            self.parked_seen.add((chain, sequence))
            self.parked_again += not is_counted
        if not is_counted:
            self.others += 1
            return
        scanned = self.chains.setdefault(chain, ScannedChain(sequence, sequence, 0, at, self.held))
        scanned.count += 1
        scanned.first = min(scanned.first, sequence)
        if sequence >= scanned.newest:
            scanned.newest, scanned.at, scanned.before = sequence, at, self.held


async def run_scan(client: FloeClient, stream: str, retention: str, scan: TargetScan) -> TargetScan:
    """`retention`: the stream's. A work queue allows no second consumer, so it is asked message by message. Raises
    Unavailable where it does not answer, ApiError.
    """

    def add(message: Message) -> None:
        scan.add(message.sequence, message.headers)

    if retention == "limits":
        await read_through(client, stream, scan.last, add, after=scan.after, headers_only=True)
        return scan
    at = scan.after + 1
    while at <= scan.last:
        if (message := await next_message(client, stream, at)) is None or message.sequence > scan.last:
            break
        add(message)
        at = message.sequence + 1
    return scan
