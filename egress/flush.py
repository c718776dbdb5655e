"""Flush of open segments on request of a command or SIGUSR1, instead of by age or size.

    egress.flush.{site}    in the state bucket: the request to each feed, and its outcome in each partition

Every process of the site reads this one key and answers for the partitions under its leases: first with the range that
it closed, then that it is stored. If a session ends in between, the next session of that partition is flushed again. If
no process holds the lease, the next one that takes it carries out the request.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import click
import msgspec
from msgspec import structs

from common.chain import Chain
from common.cli import print_json
from common.clock import Clock, SystemClock
from common.documents import JsonCodec
from common.errors import FloeError, Unavailable, UsageError
from common.exits import choices, floe_command
from common.logs import get_logger
from common.nats.buckets import optional_leases, optional_state
from common.nats.kv import KeyValue, KvDocument, state_key
from common.nats.lease import Leases, new_owner
from common.settings.root import Settings
from common.settings.types import format_count, size_words
from common.tasks import Stop, restart_on_error, wait_for
from egress.account import all_feeds
from egress.context import connect_egress, find_feed, parse_feed
from egress.feed import PartitionFeed
from egress.partition import Partition, all_partitions, kv_error, lease_key, partitions_of, require_feeds
from egress.session import SessionFlush

log = get_logger("egress.flush")

FLUSH_POLL_S = 0.2  # seconds between two checks of a command that waits
FLUSH_REPORT_S = 10.0  # seconds between two of its progress lines

CLOSING_STATE, STORED, EMPTY, REQUESTED, NO_HOLDER = "closing", "stored", "nothing open", "asked", "no holder"


class FlushAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome in one partition: the segment closed, from `first` (None if nothing was open) to `last`, up to which
    everything was received. `is_stored`: everything up to `last` is stored.
    """

    incarnation: int
    last: int
    is_stored: bool = False
    first: int | None = None
    messages: int = 0
    bytes: int = 0

    @property
    def state(self) -> str:
        """State as one word."""
        return CLOSING_STATE if not self.is_stored else EMPTY if self.first is None else STORED


class FlushRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to flush one feed. `answers`: by partition; `only`: the partitions that it is for, empty for all."""

    id: str
    asked: float
    answers: dict[int, FlushAnswer]
    only: tuple[int, ...] = ()

    def needs_flush(self, partition: int) -> bool:
        """True if the partition has still to be flushed."""
        answer = self.answers.get(partition)
        return partition in (self.only or (partition,)) and not (answer and answer.is_stored)


class FlushRequests(msgspec.Struct, frozen=True, tag_field="format_version", tag=1):
    """Newest request to each feed of a site."""

    feeds: dict[str, FlushRequest]

    def with_request(self, chains: Iterable[Chain], counts: Mapping[str, int], uid: str, now: float) -> "FlushRequests":
        """Return a copy with a new request to these partitions, and to those of the same feeds with an open request;
        answers of the others remain. `counts`: the number of partitions of each feed.
        """
        feeds, wanted = dict(self.feeds), {name: set[int]() for name in counts}
        for chain in chains:
            wanted[chain.feed].add(chain.partition)
        for name, only in wanted.items():
            before = feeds.get(name, FlushRequest("", now, {}, (-1,)))
            only |= {partition for partition in range(counts[name]) if before.needs_flush(partition)}
            kept = {partition: answer for partition, answer in before.answers.items() if partition not in only}
            is_all = len(only) >= counts[name]
            feeds[name] = FlushRequest(uid, now, kept, () if is_all else tuple(sorted(only)))
        return FlushRequests(feeds)

    def with_answers(self, answers: Mapping[Chain, tuple[str, FlushAnswer]]) -> "FlushRequests":
        """Return a copy with these answers, each with the id of its request; answers to other requests are dropped."""
        feeds = dict(self.feeds)
        for chain, (number, answer) in answers.items():
            if (found := feeds.get(chain.feed)) is not None and found.id == number:
                feeds[chain.feed] = structs.replace(found, answers={**found.answers, chain.partition: answer})
        return FlushRequests(feeds)


_FORM = JsonCodec(FlushRequests)


def flush_requests(state: KeyValue, site: str) -> KvDocument[FlushRequests]:
    """Return the document of requests to the feeds of a site. Read with `allow_unreadable`, an unreadable one requests
    nothing.
    """
    return KvDocument(state, state_key("egress", "flush", site), _FORM, kv_error(f"flush of {site}", ""))


class FlushWatch:
    """Execution of the requests to the `feeds` of this process, checked at intervals of `period` seconds."""

    def __init__(self, site: str, feeds: Sequence[PartitionFeed], state: KeyValue, clock: Clock, period: float) -> None:
        self._feeds, self._clock, self._period = feeds, clock, period
        self._requests = flush_requests(state, site)
        self._done: dict[Chain, tuple[str, SessionFlush]] = {}
        self._failure = ""

    def flush_all(self) -> None:
        """Close the open segment of every feed that this process holds."""
        flushes = [flush for feed in self._feeds if (flush := feed.flush()) is not None]
        closed = sum(flush.closed is not None for flush in flushes)
        log.info("open segments flushed by signal", action="flush_signalled", partitions=len(flushes), closed=closed)

    async def run(self, stop: Stop) -> None:
        """Carry out requests until `stop` is set; begin again after an unexpected error."""
        await restart_on_error("flush", lambda: self._watch(stop), self._clock)

    async def _watch(self, stop: Stop) -> None:
        while not await wait_for(stop, self._period):
            try:
                await self._check_requests()
                self._failure = ""
            except FloeError as error:
                if self._failure != error.code:
                    self._failure = error.code
                    log.info("flush request check deferred", action="flush_deferred", code=error.code, error=str(error))

    async def _check_requests(self) -> None:
        found = (await self._requests.get(allow_unreadable=True))[0] or FlushRequests({})
        answers: dict[Chain, tuple[str, FlushAnswer]] = {}
        for feed in self._feeds:
            if (request := found.feeds.get(feed.chain.feed)) is None:
                continue
            if not request.needs_flush(feed.chain.partition):
                continue
            before = request.answers.get(feed.chain.partition)
            if (answer := self._flush(feed, request.id, before)) is not None and answer != before:
                answers[feed.chain] = request.id, answer
        if answers:
            await self._requests.change(lambda found: found and found.with_answers(answers), allow_unreadable=True)

    def _flush(self, feed: PartitionFeed, number: str, before: FlushAnswer | None) -> FlushAnswer | None:
        """Return the outcome of the request in one partition. None if this process does not read it, or has not read as
        far yet as the process that answered `before`, which has put nothing.
        """
        known, flush = self._done.get(feed.chain, ("", None))
        if flush is None or known != number or (flush.is_over and not flush.is_stored):
            flush = feed.flush(before.incarnation, before.last) if before else feed.flush()
            if flush is None:
                return None
            self._done[feed.chain] = number, flush
            log.info("segment flushed", action="segment_flushed", last=flush.last, **flush.chain.log_context())
        answer = flush.chain.incarnation, flush.last, flush.is_stored
        closed = flush.closed
        return FlushAnswer(*answer, closed.first, closed.messages, closed.size) if closed else FlushAnswer(*answer)


class FlushCommand:
    """Request for a flush of `partitions`, all of one site, and its outcome."""

    def __init__(self, partitions: Sequence[Partition], state: KeyValue, clock: Clock) -> None:
        self._chains, self._clock = [each.chain for each in partitions], clock
        self._counts = {each.chain.feed: len(each.settings.filters()) for each in partitions}
        self._requests = flush_requests(state, self._chains[0].site)
        self._found, self._held = FlushRequests({}), set(self._chains)

    async def find_holders(self, leases: Leases) -> bool:
        """Wait only for the partitions with a held lease. Return True if there are any."""
        self._held = {each for each in self._chains if await leases.get_owner(lease_key(each)) is not None}
        return bool(self._held)

    async def send_request(self) -> None:
        """Write the request for all partitions."""
        uid, now = secrets.token_hex(8), self._clock.now()

        def with_request(found: FlushRequests | None) -> FlushRequests:
            return (found or FlushRequests({})).with_request(self._chains, self._counts, uid, now)

        self._found = await self._requests.change(with_request, allow_unreadable=True) or self._found

    async def wait(self, seconds: float, report: Callable[[str], None]) -> bool:
        """Return True if all awaited partitions are stored within `seconds`; `report` receives lines about the
        progress.

        If another command requests a flush meanwhile, its answer is awaited: it closes later than this one.
        """
        began = reported_at = self._clock.monotonic()
        while (left := sum(row["state"] in (REQUESTED, CLOSING_STATE) for row in self.rows())) > 0:
            if (now := self._clock.monotonic()) - began >= seconds:
                return False
            if now - reported_at >= FLUSH_REPORT_S:
                reported_at = now
                report(f"{len(self._held) - left} of {format_count(len(self._held), 'partition')} stored")
            await self._clock.sleep(FLUSH_POLL_S)
            self._found = (await self._requests.get(allow_unreadable=True))[0] or self._found
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Return the known state of each partition."""
        return [self._row(chain) for chain in self._chains]

    def _row(self, chain: Chain) -> dict[str, Any]:
        request = self._found.feeds.get(chain.feed)
        answer = request.answers.get(chain.partition) if request else None
        state = answer.state if answer else REQUESTED if chain in self._held else NO_HOLDER
        known = {name: getattr(answer, name, None) for name in ("incarnation", "first", "last", "messages", "bytes")}
        return {**chain.log_context(), "state": state, **known}


async def run_flush(settings: Settings, name: str, wait: bool | None, timeout: float, as_json: bool) -> int:
    """Run `floe egress flush` for the feed or chain of that name (empty: all feeds), and print the outcome. `wait`:
    True waits for a holder too, False for nothing.

    Raises Unavailable if no process holds a lease, or if the segments are not stored after `timeout` seconds;
    UsageError for another name, and for an incarnation that has ended.
    """
    require_feeds(settings.egress.feeds_)
    feed, incarnation, number = parse_feed(settings, name)
    clock, partitions = SystemClock(), list[Partition]()
    if name:
        partitions = partitions_of(settings.site, find_feed(settings, feed), number)
    async with aclosing(await connect_egress(settings, "flush", clock)) as client:
        if not name:
            partitions = all_partitions(settings.site, await all_feeds(client, settings))
        if not partitions:
            click.echo("no stream of the account matches a pattern", err=True)
            return 0
        flushing = FlushCommand(partitions, optional_state(client, settings.egress), clock)
        if not wait:
            leases = optional_leases(client, settings.egress, new_owner(settings.instance), clock)
            if not await flushing.find_holders(leases):
                what = f"flush of {settings.site}/{feed or '*'}: no process holds the lease, so no segment is open"
                raise Unavailable(what, hint=choices(("start egress", floe_command("egress run"))), code="E-LEASE")
        await flushing.send_request()
        is_done = wait is False or await flushing.wait(timeout, partial(click.echo, err=True))
    rows = flushing.rows()
    print_json(rows) if as_json else click.echo("\n".join(map(_line, rows)))
    for newest in {row["incarnation"] for row in rows if None not in (incarnation, row["incarnation"])} - {incarnation}:
        raise UsageError(f"{name}: expected the newest incarnation, {newest:04d}, which was flushed: others have ended")
    left = format_count(sum(row["state"] in (REQUESTED, CLOSING_STATE, NO_HOLDER) for row in rows), "partition")
    hint = choices(("show the state", floe_command("status")))
    if not is_done:
        raise Unavailable(f"flush: expected all stored within {timeout:g} s, found {left} not stored", hint=hint)
    if any(row["state"] == NO_HOLDER for row in rows):
        raise Unavailable(f"flush: no process holds the lease of {left}: the next flushes", hint=hint, code="E-LEASE")
    return 0


def _line(row: Mapping[str, Any]) -> str:
    incarnation = "" if row["incarnation"] is None else f"/{row['incarnation']:04d}/{row['partition']}"
    chain = f"{row['site']}/{row['feed']}{incarnation or '/-/' + str(row['partition'])}"
    if row["first"] is None:
        return f"{chain}: {row['state']}"
    held = f"{format_count(row['messages'], 'message')}, {size_words(row['bytes'])}"
    return f"{chain}: {row['first']}..{row['last']} {row['state']}, {held}"
