"""Watch on the streams of the account: feeds of streams that patterns match come and go, uncovered streams are named.

    egress.account.{site}    in the state bucket: the matched streams, and those whose deletion was announced

A matched stream is written there before its feed begins. So a stream that vanishes while no process runs is missed by
the next one. Its feed stops as any feed without a stream, unless a process received the announcement of the deletion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from common.clock import parse_time
from common.documents import JsonCodec
from common.errors import FloeError, Refused
from common.logs import get_logger
from common.nats.client import FloeClient, RawSubscription
from common.nats.kv import KeyValue, KvDocument, state_key
from common.observe.monitor import Health
from common.observe.observation import unarchived
from common.settings.root import Settings
from common.settings.types import format_count
from common.tasks import PendingError, Stop, first_of, restart_on_error, run_until_stopped
from egress import metrics
from egress.account import ACCOUNT_PART, MAX_SHOWN_NAMES, REFUSED_RETRY_S, AccountListing, AccountPlan, plan_account
from egress.partition import kv_error

if TYPE_CHECKING:
    from egress.feed import FeedSet
    from egress.report import FeedReport

log = get_logger(__name__)

DELETION_PREFIX = "$JS.EVENT.ADVISORY.STREAM.DELETED."  # the name of the stream follows
_decode_advisory = msgspec.json.Decoder(dict).decode
MAX_DELETED = 1000  # streams that are remembered, so that all processes end their feeds of many at once


class DeletedStream(msgspec.Struct, frozen=True):
    """A stream whose deletion was announced. `at`: seconds since 1970; `end`: the last archived sequence, 0 if there is
    none; `last`: the last sequence of the stream when it was last inspected; `unarchived`: the sequences that were not
    archived then; rows that a former holder of the lease had received may be put later. None: not known.
    """

    at: float
    end: int
    last: int | None
    unarchived: int | None

    def __str__(self) -> str:
        if self.unarchived is None:
            return "an unknown number of sequences never archived"
        return f"{format_count(self.unarchived, 'sequence')} never archived, as of sequence {self.last}"


class MatchedStreams(msgspec.Struct, frozen=True, tag_field="format_version", tag=1):
    """The streams of a site that patterns match, by name. `deleted`: the newest MAX_DELETED ones."""

    feeds: tuple[str, ...] = ()
    deleted: dict[str, DeletedStream] = {}

    def with_feeds(self, names: Iterable[str]) -> MatchedStreams:
        """Return a copy with these streams, which exist."""
        deleted = {name: each for name, each in self.deleted.items() if name not in names}
        return MatchedStreams(tuple(sorted({*self.feeds, *names})), deleted)

    def with_deleted(self, found: Mapping[str, DeletedStream]) -> MatchedStreams:
        """Return a copy without these streams among those that exist."""
        newest = sorted({**self.deleted, **found}.items(), key=lambda item: item[1].at)[-MAX_DELETED:]
        return MatchedStreams(tuple(name for name in self.feeds if name not in found), dict(newest))


_FORM = JsonCodec(MatchedStreams)


def matched_streams(state: KeyValue, site: str) -> KvDocument[MatchedStreams]:
    """Return the document of a site. Read with `allow_unreadable`, an unreadable one has no streams."""
    return KvDocument(state, state_key("egress", "account", site), _FORM, kv_error(f"streams of {site}", ""))


class AccountWatch:
    """Watch on the account's streams, every `period` seconds. `feeds`: receives those of patterns."""

    def __init__(
        self, settings: Settings, client: FloeClient, state: KeyValue, health: Health, period: float, feeds: FeedSet
    ) -> None:
        self._client, self._clock, self._health, self._period, self._feeds = client, client.clock, health, period, feeds
        self._document, self._pending = matched_streams(state, settings.site), PendingError()
        self._known_ends: dict[str, int] = {}  # the last sequences of matched streams when they were found
        self._announced: set[str] = set()  # matched streams whose deletion was known at the last listing
        self._subscription: RawSubscription | None = None
        self._subscribe_at = 0.0
        self._uncovered: list[str] = []
        self._failure = ""
        self.adopt(settings)
        if self._has_patterns:
            health.set_ready(ACCOUNT_PART, False, "the streams of the account are not listed yet")

    def adopt(self, settings: Settings) -> None:
        """Follow the patterns of `settings` from now on, with a listing at once."""
        self._settings, self._listing = settings, AccountListing(self._client, settings)
        self._has_patterns = bool(settings.egress.patterns)
        self._pending.event.set()

    async def run(self, stop: Stop) -> None:
        """List until `stop` is set; begin again after an unexpected error."""
        await restart_on_error("account", lambda: self._watch(stop), self._clock)

    async def _watch(self, stop: Stop) -> None:
        self._pending = PendingError()
        try:
            while not stop.is_set:
                self._pending.raise_if_set()
                self._pending.event.clear()
                try:
                    await run_until_stopped(stop, self._check())
                    self._failure = ""
                except FloeError as error:
                    if self._failure != error.code:
                        self._failure = code = error.code
                        log.info("account listing deferred", action="account_deferred", code=code, error=str(error))
                await first_of(stop.wait(), self._pending.event.wait(), seconds=self._period)
        finally:
            if self._subscription is not None:
                await self._subscription.unsubscribe()
                self._subscription = None

    async def _check(self) -> None:
        if self._has_patterns:
            await self._subscribe()
        matched = self._feeds.matched()
        if (streams := await self._listing.read(matched)) is None:
            reason = "the right to STREAM.NAMES is missing"
            self._health.set_status(ACCOUNT_PART, {"uncovered": f"not known: {reason}"})
            self._health.set_ready(ACCOUNT_PART, not self._has_patterns, reason)
            return
        listed = {each.name for each in streams}
        self._forget_deletions(listed)
        plan = plan_account((each for each in streams if each.name not in matched), self._settings)
        self._known_ends |= {s.name: s.info.last_sequence for s in streams if s.info and s.name in plan.feeds}
        deleted = await self._update_feeds(plan, listed) if self._has_patterns else {}
        self._health.set_ready(ACCOUNT_PART, True)
        self._show(len(streams), plan.uncovered, deleted)

    def _forget_deletions(self, listed: Set[str]) -> None:
        """Forget the announced deletion of a stream that was made again since, by two listings: the next is another."""
        reports = {name: each.report for name, each in self._feeds.matched().items()}
        for name in self._announced & listed & reports.keys():
            reports[name].deleted_at_ns = 0
            self._known_ends.pop(name, None)
        self._announced = {name for name, each in reports.items() if each.deleted_at_ns}

    async def _update_feeds(self, plan: AccountPlan, listed: set[str]) -> dict[str, DeletedStream]:
        """Add the feeds of the plan, and of former streams that are gone; remove those of deleted streams. Return all
        deleted ones.
        """
        settings = self._settings
        found = (await self._document.get(allow_unreadable=True))[0] or MatchedStreams()
        new, matched = dict(plan.feeds), self._feeds.matched()
        # Gone, or now of a retention that the pattern does not take: its feed stops and names the reason.
        for name in {*found.feeds} - matched.keys() - (listed - plan.uncovered.keys()):
            if (feed := settings.egress.feed_named(name)) is not None and feed.streams:
                new[name] = feed
        if new.keys() - {*found.feeds}:
            found = await self._change(lambda now: now.with_feeds(new)) or found
        for name, feed in new.items():
            if settings is self._settings:  # else the next listing decides
                log.info("feed added", action="feed_added", feed=name, pattern=feed.pattern)
                self._feeds.change(name, feed)
        ended = {name: self._deleted(name, each.report) for name, each in matched.items() if each.report.is_deleted}
        ended = {name: each for name, each in ended.items() if name not in listed}
        if ended:
            found = await self._change(lambda now: now.with_deleted(ended)) or found
        # Of many at once the document keeps the newest; the feeds of all of them end.
        for name in self._feeds.matched().keys() & (found.deleted.keys() | ended.keys()) - listed:
            self._feeds.change(name, None)
            self._known_ends.pop(name, None)
        for name, each in ended.items():
            context = {**structs.asdict(each), "feed": name}
            log.warning("stream deleted", action="stream_deleted", **context)
        return found.deleted

    async def _change(self, step: Callable[[MatchedStreams], MatchedStreams]) -> MatchedStreams | None:
        return await self._document.change(lambda now: step(now or MatchedStreams()), allow_unreadable=True)

    def _deleted(self, name: str, report: FeedReport) -> DeletedStream:
        first, end, last = report.bounds
        if last is None and not end:
            last = self._known_ends.get(name)  # of the stream that was found, of which nothing was archived
        last = None if last is None else max(last, end)
        return DeletedStream(self._clock.now(), end, last, unarchived(last, end, first))

    async def _subscribe(self) -> None:
        """Listen for deletions, where the rights allow it."""
        if self._subscription is not None or self._clock.monotonic() < self._subscribe_at:
            return
        subject = f"{DELETION_PREFIX}>"
        self._client.allow_refusal(subject)
        try:
            self._subscription = await self._client.subscribe_raw(subject, self._on_deletion, self._pending.set)
        except Refused as error:
            self._subscribe_at = self._clock.monotonic() + REFUSED_RETRY_S
            context = {"right": subject, "code": error.code, "error": str(error)}
            log.info("account right missing", action="account_right_missing", **context)

    def _on_deletion(self, subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        name = subject.decode("utf-8", "backslashreplace").removeprefix(DELETION_PREFIX)
        with suppress(msgspec.MsgspecError, ValueError):  # no advisory of a server
            at_ns = parse_time(str(_decode_advisory(payload).get("timestamp")))
            if (feed := self._feeds.matched().get(name)) is not None:
                feed.report.announce_deletion(at_ns)

    def _show(self, streams: int, uncovered: Mapping[str, str], deleted: Mapping[str, DeletedStream]) -> None:
        found = [f"{name} ({reason})" if reason else name for name, reason in uncovered.items()]
        metrics.uncovered.labels(self._settings.site).set(len(found))
        shown: dict[str, object] = {"streams": streams}
        if self._has_patterns:
            newest = [*deleted.items()][: -MAX_SHOWN_NAMES - 1 : -1]
            texts = [f"{name}: {each}" for name, each in newest]
            shown |= {"matched": len(self._feeds.matched()), "deleted_streams": len(deleted), "deleted": texts}
        shown |= {"uncovered_streams": len(found), "uncovered": found[:MAX_SHOWN_NAMES]}
        self._health.set_status(ACCOUNT_PART, shown)
        if new := sorted({*found} - {*self._uncovered}):
            names = ", ".join(new[:MAX_SHOWN_NAMES])
            hint = "archive them with a feed, or name them in egress.not_archived"
            log.warning("streams uncovered", action="streams_uncovered", count=len(new), streams=names, hint=hint)
        self._uncovered = found
