"""Flush of open segments on request of a command or SIGUSR1, instead of by age or size.

    egress.flush.{site}    in the state bucket: the request to each partition, and its outcome

Every process of the site reads this one key and answers for the partitions under its leases: first with the sequence up
to which it closed, then that this is stored. If a session ends in between, the next session of that partition is
flushed again. If no process holds the lease, the next one that takes it carries out the request.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import click
import msgspec

from common.chain import Chain
from common.cli import print_json
from common.clock import Clock, SystemClock
from common.documents import JsonCodec
from common.errors import FloeError, Unavailable, UsageError
from common.exits import choices, floe_command
from common.logs import get_logger
from common.nats.kv import KeyValue, KvDocument, optional_state, state_key
from common.nats.lease import new_owner, optional_leases
from common.settings.root import Settings
from common.settings.types import format_count
from common.tasks import Stop, restart_on_error, wait_for
from egress.account import all_feeds
from egress.deps import connect_egress, find_feed, parse_feed
from egress.feed import PartitionFeed
from egress.partition import all_partitions, kv_error, lease_key, partitions_of, require_feeds
from egress.session import SessionFlush

log = get_logger("egress.flush")

FLUSH_POLL_S = 0.2  # seconds between two checks of a command that waits
FLUSH_REPORT_S = 10.0  # seconds between two of its progress lines

CLOSING_STATE, STORED, REQUESTED, NO_HOLDER = "closing", "stored", "asked", "no holder"


class FlushRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to flush one partition, and its outcome. `last`: the sequence up to which everything was received and
    closed, None without an answer. `is_stored`: all of this is stored.
    """

    id: str
    incarnation: int | None = None
    last: int | None = None
    is_stored: bool = False

    @property
    def state(self) -> str:
        """State as one word."""
        return STORED if self.is_stored else REQUESTED if self.last is None else CLOSING_STATE


class FlushRequests(msgspec.Struct, frozen=True, tag_field="format_version", tag=1):
    """Newest request to each partition of a site, by `FEED/PARTITION`."""

    partitions: dict[str, FlushRequest]

    def with_requests(self, names: Iterable[str], uid: str) -> "FlushRequests":
        """Return a copy with a new request to these partitions."""
        return FlushRequests({**self.partitions, **{name: FlushRequest(uid) for name in names}})

    def with_answers(self, answers: Mapping[str, FlushRequest]) -> "FlushRequests":
        """Return a copy with these outcomes; those of requests that have been replaced are dropped."""
        known = {name: request.id for name, request in self.partitions.items()}
        kept = {name: answer for name, answer in answers.items() if known.get(name) == answer.id}
        return FlushRequests({**self.partitions, **kept})


_FORM = JsonCodec(FlushRequests)


def flush_requests(state: KeyValue, site: str) -> KvDocument[FlushRequests]:
    """Return the document of requests to the partitions of a site. Read with `allow_unreadable`, an unreadable one
    requests nothing.
    """
    return KvDocument(state, state_key("egress", "flush", site), _FORM, kv_error(f"flush of {site}", ""))


def _name(chain: Chain) -> str:
    return f"{chain.feed}/{chain.partition}"


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
        log.info("open segments flushed by signal", action="flush_signalled", partitions=len(flushes))

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
        answers: dict[str, FlushRequest] = {}
        requests = [(feed, found.partitions.get(_name(feed.chain))) for feed in self._feeds]
        open_ = [(feed, request) for feed, request in requests if request is not None and not request.is_stored]
        self._done = {feed.chain: self._done[feed.chain] for feed, _ in open_ if feed.chain in self._done}
        for feed, request in open_:
            if (answer := self._flush(feed, request)) != request:
                answers[_name(feed.chain)] = answer
        if answers:
            await self._requests.change(lambda found: found and found.with_answers(answers), allow_unreadable=True)

    def _flush(self, feed: PartitionFeed, request: FlushRequest) -> FlushRequest:
        """Return the request with its outcome; unchanged if this process does not read the partition, or has not read
        as far yet as the process that answered before, which has put nothing.
        """
        known, flush = self._done.get(feed.chain, ("", None))
        if flush is None or known != request.id or (flush.is_over and not flush.is_stored):
            flush = feed.flush(request.incarnation, request.last or 0)
            if flush is None:
                return request
            self._done[feed.chain] = request.id, flush
            log.info("segment flushed", action="segment_flushed", last=flush.last, **flush.chain.log_context())
        return FlushRequest(request.id, flush.chain.incarnation, flush.last, flush.is_stored)


async def run_flush(settings: Settings, name: str, wait: bool | None, timeout: float, as_json: bool) -> int:
    """Run `floe egress flush` for the feed or chain of that name (empty: all feeds), and print the outcome. `wait`:
    True waits for a holder too, False for nothing.

    Raises Unavailable if no process holds a lease, or if the segments are not stored after `timeout` seconds;
    UsageError for another name, and for an incarnation that has ended.
    """
    require_feeds(settings.egress.feeds_)
    feed, incarnation, number = parse_feed(settings, name)
    partitions = partitions_of(settings.site, find_feed(settings, feed), number) if name else []
    clock = SystemClock()
    async with aclosing(await connect_egress(settings, "flush", clock)) as client:
        if not name:
            partitions = all_partitions(settings.site, await all_feeds(client, settings))
        if not partitions:
            click.echo("no stream of the account matches a pattern", err=True)
            return 0
        chains = {_name(each.chain): each.chain for each in partitions}
        awaited = set(chains)
        if not wait:
            leases = optional_leases(client, settings.egress, new_owner(settings.instance), clock)
            awaited = {key for key, chain in chains.items() if await leases.get_owner(lease_key(chain)) is not None}
            if not awaited:
                what = f"flush of {settings.site}/{feed or '*'}: no process holds the lease, so no segment is open"
                raise Unavailable(what, hint=choices(("start egress", floe_command("egress run"))), code="E-LEASE")
        requests, uid = flush_requests(optional_state(client, settings.egress), settings.site), secrets.token_hex(8)
        await requests.change(
            lambda found: (found or FlushRequests({})).with_requests(chains, uid), allow_unreadable=True
        )
        found: Mapping[str, FlushRequest] = {key: FlushRequest(uid) for key in chains}
        if wait is not False:
            found = await _wait(requests, found, awaited, clock, timeout)
    rows = [_row(chain, found[key], NO_HOLDER if key not in awaited else REQUESTED) for key, chain in chains.items()]
    print_json(rows) if as_json else click.echo("\n".join(map(_line, rows)))
    for newest in {row["incarnation"] for row in rows if None not in (incarnation, row["incarnation"])} - {incarnation}:
        raise UsageError(f"{name}: expected the newest incarnation, {newest:04d}, which was flushed: others have ended")
    left = format_count(sum(row["state"] != STORED for row in rows), "partition")
    hint = choices(("show the state", floe_command("status")))
    if wait is not False and not all(found[key].is_stored for key in awaited):
        raise Unavailable(f"flush: expected all stored within {timeout:g} s, found {left} not stored", hint=hint)
    if any(row["state"] == NO_HOLDER for row in rows):
        raise Unavailable(f"flush: no process holds the lease of {left}: the next flushes", hint=hint, code="E-LEASE")
    return 0


async def _wait(
    requests: KvDocument[FlushRequests],
    found: Mapping[str, FlushRequest],
    awaited: Collection[str],
    clock: Clock,
    seconds: float,
) -> Mapping[str, FlushRequest]:
    """Return the requests once all `awaited` ones are stored, or after so many seconds; print lines about the progress.

    If another command requests a flush meanwhile, its answer is awaited: it closes later than this one.
    """
    began = reported_at = clock.monotonic()
    while (left := sum(not found[key].is_stored for key in awaited)) > 0:
        if (now := clock.monotonic()) - began >= seconds:
            break
        if now - reported_at >= FLUSH_REPORT_S:
            reported_at = now
            click.echo(f"{len(awaited) - left} of {format_count(len(awaited), 'partition')} stored", err=True)
        await clock.sleep(FLUSH_POLL_S)
        if (read := (await requests.get(allow_unreadable=True))[0]) is not None:
            found = {**found, **read.partitions}
    return found


def _row(chain: Chain, request: FlushRequest, without_answer: str) -> dict[str, Any]:
    state = without_answer if request.last is None else request.state
    return {**chain.log_context(), "state": state, "incarnation": request.incarnation, "last": request.last}


def _line(row: Mapping[str, Any]) -> str:
    incarnation = "-" if row["incarnation"] is None else f"{row['incarnation']:04d}"
    until = "" if row["last"] is None else f" up to {row['last']}"
    return f"{row['site']}/{row['feed']}/{incarnation}/{row['partition']}: {row['state']}{until}"
