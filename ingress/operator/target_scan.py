"""Scan of a target's messages, headers only: the messages of each chain, and the number of messages that are gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from common.archive.segment import Message
from common.chain import Chain
from common.nats.api import next_message
from common.nats.client import FloeClient
from common.nats.pull import for_each_message
from ingress.verdict.verdict import NoOrigin, origin_of

PROGRESS_MESSAGES = 1000  # messages between two calls of `tell`


@dataclass(slots=True)
class ScannedChain:
    """The messages of one chain in the range that was read.

    `first`, `newest`: least and greatest sequence found, `count`: messages; `newest_at`: target sequence of the newest;
    `found_before`: messages of any kind that were read up to and including it.
    """

    first: int
    newest: int
    count: int
    newest_at: int
    found_before: int


@dataclass(slots=True)
class TargetScan:
    """Content of a target after sequence `after`, up to and including `last`.

    `found`: messages of any kind, `foreign`: messages without provenance, `unexpected`: messages with one that
    `accepts` rejects (None: it accepts all). `parked`: parked messages to find; `parked_seen`: those that are in the
    target, `parked_repeats`: how often one of them was found that `accepts` rejects. `on_progress`: called every
    `PROGRESS_MESSAGES` messages, to report the progress.
    """

    after: int
    last: int
    accepts: Callable[[Chain, int], bool] | None = None
    parked: Collection[tuple[Chain, int]] = ()
    on_progress: Callable[[TargetScan], None] | None = None
    found: int = field(default=0, init=False)
    foreign: int = field(default=0, init=False)
    unexpected: int = field(default=0, init=False)
    chains: dict[Chain, ScannedChain] = field(default_factory=dict, init=False)
    parked_seen: set[tuple[Chain, int]] = field(default_factory=set, init=False)
    parked_repeats: int = field(default=0, init=False)

    @property
    def gone(self) -> int:
        return max(0, self.last - self.after) - self.found

    @property
    def unexplained(self) -> int:
        return self.unexpected - self.parked_repeats

    def gone_after(self, chain: Chain) -> int:
        """Return how many gone messages were after the chain's newest: some may have been newer ones of the chain."""
        if (scanned := self.chains.get(chain)) is None:
            return self.gone
        return self.last - scanned.newest_at - (self.found - scanned.found_before)

    def add(self, at: int, headers: bytes | None) -> None:
        """Add a message. `at`: its target sequence; call in ascending order."""
        self.found += 1
        if self.on_progress is not None and self.found % PROGRESS_MESSAGES == 0:
            self.on_progress(self)
        origin = origin_of(headers)
        if isinstance(origin, NoOrigin):
            self.foreign += 1
            return
        chain, sequence = origin.chain, origin.sequence
        is_counted = self.accepts is None or self.accepts(chain, sequence)
        if (chain, sequence) in self.parked:
            self.parked_seen.add((chain, sequence))
            self.parked_repeats += not is_counted
        if not is_counted:
            self.unexpected += 1
            return
        scanned = self.chains.setdefault(chain, ScannedChain(sequence, sequence, 0, at, self.found))
        scanned.count += 1
        scanned.first = min(scanned.first, sequence)
        if sequence >= scanned.newest:
            scanned.newest, scanned.newest_at, scanned.found_before = sequence, at, self.found


async def run_scan(client: FloeClient, stream: str, retention: str, scan: TargetScan) -> TargetScan:
    """Run the scan. `retention`: the stream's. A work queue allows no second consumer, so it is read message by
    message. Raises Unavailable if it does not answer, ApiError.
    """

    def add(message: Message) -> None:
        scan.add(message.sequence, message.headers)

    if retention == "limits":
        await for_each_message(client, stream, scan.last, add, after=scan.after, headers_only=True)
        return scan
    at = scan.after + 1
    while at <= scan.last:
        if (message := await next_message(client, stream, at)) is None or message.sequence > scan.last:
            break
        add(message)
        at = message.sequence + 1
    return scan
