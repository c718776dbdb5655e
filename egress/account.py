"""Streams of the account, by a listing and a pure planner: those that patterns match, and those that are uncovered.

Each process of a site lists by itself and reaches the same answer, because the answer depends only on the streams and
the configuration.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from common.chain import FEED_PATTERN
from common.errors import FloeError, Refused
from common.logs import get_logger
from common.nats.api import LIMITS, SCRATCH_PREFIX, StreamInfo, check_token, query_message, stream_info, stream_names
from common.nats.client import FloeClient
from common.nats.headers import SOURCE_HEADER, header_value, is_replayed
from common.settings.egress import MQTT_PREFIX, FeedSettings
from common.settings.root import Settings
from common.settings.types import format_count
from common.subjects import name_matches

log = get_logger(__name__)

T = TypeVar("T")

ACCOUNT_PART = "account"  # in /status
MAX_SHOWN_NAMES = 20
PARALLEL_INSPECTIONS = 16
MAX_REINSPECTIONS = 100  # of known streams, in one listing
REINSPECTION_INTERVAL_S = 600.0  # seconds after which a stream that no feed archives is inspected again
REFUSED_RETRY_S = 3600.0  # seconds until a request that was refused is sent again
PATTERN_RETRY_S = 60.0  # the same if patterns need the answer


@dataclass(frozen=True, slots=True)
class AccountStream:
    """A stream of the account. `info`: None if it may not be read, or needs not be; `headers`: of its last message."""

    name: str
    info: StreamInfo | None = None
    headers: bytes | None = None

    @property
    def is_copy(self) -> bool:
        """True if Floe copied its last message from another stream. One that it replayed into its own is no copy."""
        block = self.headers
        return block is not None and header_value(block, SOURCE_HEADER) is not None and not is_replayed(block)

    @property
    def may_change(self) -> bool:
        """True if its next message, or the end of a restore, may make another stream of it for the planner."""
        return self.info is not None and (self.is_copy or not self.info.messages or bool(self.info.restore_marker))

    @property
    def is_mirror(self) -> bool:
        return self.info is not None and bool(self.info.config.get("mirror"))

    @property
    def is_internal(self) -> bool:
        """True for a bucket of a Floe, and while a restore fills the stream."""
        return self.info is not None and (self.info.is_bucket_of_floe or bool(self.info.restore_marker))

    @property
    def retention(self) -> str:
        return LIMITS if self.info is None else str(self.info.config.get("retention", LIMITS))


def is_exempt_by_name(name: str, settings: Settings) -> bool:
    """True if the name alone shows that the stream needs no archive: a bucket of this configuration, one of MQTT that
    no feed has, a drill's, or one that the operator named.
    """
    services = settings.egress, settings.ingress
    buckets = {f"KV_{bucket}" for each in services for bucket in (each.state_bucket, each.lease_bucket)}
    if name in buckets or name.startswith(SCRATCH_PREFIX) or settings.egress.needs_no_archive(name):
        return True
    is_excluded = any(name_matches(each, name) for feed in settings.egress.patterns for each in feed.except_)
    return (name.startswith(MQTT_PREFIX) or is_excluded) and not settings.egress.feeds_of(name)


@dataclass(frozen=True, slots=True)
class AccountPlan:
    """The feeds of streams that patterns match, and the uncovered streams, each with the reason, empty if no pattern
    matches; both by name, ascending.
    """

    feeds: Mapping[str, FeedSettings]
    uncovered: Mapping[str, str]


def plan_account(streams: Iterable[AccountStream], settings: Settings) -> AccountPlan:
    feeds, uncovered = dict[str, FeedSettings](), dict[str, str]()
    named = {feed.stream for feed in settings.egress.feeds}
    names = {feed.name for feed in settings.egress.feeds}
    for each in sorted(streams, key=lambda stream: stream.name):
        if each.name in named or is_exempt_by_name(each.name, settings) or each.is_internal:
            continue
        [feed] = settings.egress.feeds_of(each.name) or [None]
        if (each.is_copy and not (feed and feed.relay)) or (each.is_mirror and not (feed and feed.mirrors)):
            continue
        if (reason := _refusal(each, feed, names)) is not None:
            uncovered[each.name] = reason
        elif feed is not None and (each.retention != LIMITS or (each.info and each.info.messages)):
            # An empty one may become a target of Floe; another retention keeps nothing before its durable exists.
            feeds[each.name] = feed
    return AccountPlan(feeds, uncovered)


def _refusal(stream: AccountStream, feed: FeedSettings | None, names: Container[str]) -> str | None:
    """Return the reason why no feed archives the stream, empty if no pattern matches; None if `feed` does."""
    if stream.name in names:
        return "a feed of another stream has this name"
    if feed is None:
        return ""
    if stream.info is None:
        return "its retention is not known"
    return None if stream.retention in feed.retention else f"retention {stream.retention}"


def uncovered_part(parts: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the part of /status with the account's streams, of the first process that has one; empty without any."""
    shown = [part for name, part in parts.items() if name == ACCOUNT_PART or name.startswith(f"{ACCOUNT_PART} (")]
    return next((part for part in shown if "uncovered_streams" in part), {})


def deleted_text(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the streams whose deletion was announced, for people; empty if there are none. `parts`: of /status."""
    shown = uncovered_part(parts)
    if not (count := shown.get("deleted_streams")):
        return ""
    return f"{format_count(count, 'deleted stream')}: {'; '.join(shown['deleted'])}"


def uncovered_text(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the uncovered streams for people; empty if there are none, or it is not known. `parts`: of /status."""
    shown = uncovered_part(parts)
    if not (count := shown.get("uncovered_streams")):
        return ""
    names = ", ".join(shown.get("uncovered", ()))
    more = f" and {count - len(shown['uncovered'])} more" if count > len(shown["uncovered"]) else ""
    return f"{format_count(count, 'stream')} in no feed: {names}{more}"


class AccountListing:
    """Listing of the account's streams. A stream is inspected when it appears, and seldom again.

    A request that the rights refuse is sent again after an hour, or after a minute if patterns need it; until then its
    answer counts as not known.
    """

    def __init__(self, client: FloeClient, settings: Settings) -> None:
        self._client, self._settings, self._clock = client, settings, client.clock
        self._known: dict[str, tuple[AccountStream, float]] = {}
        self._refused: dict[str, float] = {}
        self._retry_s = PATTERN_RETRY_S if settings.egress.patterns else REFUSED_RETRY_S

    async def read(self, running: Iterable[str] = ()) -> list[AccountStream] | None:
        """Return the streams; None if they may not be listed. Those of `running` are not inspected again.

        Raises Unavailable, OutcomeUnknown, ApiError.
        """
        names = await self._permitted("STREAM.NAMES", "", lambda: stream_names(self._client))
        if names is None:
            return None
        self._known = {name: self._known[name] for name in names if name in self._known}
        due = self._due(names, running)
        failures = list[FloeError]()
        for begin in range(0, len(due), PARALLEL_INSPECTIONS):
            found = await asyncio.gather(*map(self._inspect, due[begin : begin + PARALLEL_INSPECTIONS]))
            failures += filter(None, found)
            if len(failures) >= PARALLEL_INSPECTIONS:  # not only a stream without a leader
                raise failures[0]
        unknown = {*due} - self._known.keys()
        streams = (name for name in names if name not in unknown)
        return [self._known[name][0] if name in self._known else AccountStream(name) for name in streams]

    def _due(self, names: list[str], running: Iterable[str]) -> list[str]:
        covered = {*(feed.stream for feed in self._settings.egress.feeds), *running}
        new = [name for name in names if name not in self._known and FEED_PATTERN.fullmatch(name)]
        new = [name for name in new if name not in covered and not is_exempt_by_name(name, self._settings)]
        before = self._clock.monotonic() - REINSPECTION_INTERVAL_S
        again = [name for name, (each, at) in self._known.items() if name not in covered and _is_due(each, at, before)]
        again.sort(key=lambda name: self._known[name][1])
        return new + again[:MAX_REINSPECTIONS]

    async def _inspect(self, name: str) -> FloeError | None:
        """Inspect the stream; return the error if there is no answer."""
        message = None
        try:
            info = await self._permitted("STREAM.INFO", name, lambda: stream_info(self._client, name))
            if info is not None and info.messages and not AccountStream(name, info).is_internal:
                last = {"seq": info.last_sequence}
                message = await self._permitted("STREAM.MSG.GET", name, lambda: query_message(self._client, name, last))
        except FloeError as error:
            log.debug("stream not inspected", action="stream_uninspected", stream=name, error=str(error))
            return error
        headers = None if message is None else message.headers
        self._known[name] = AccountStream(name, info, headers), self._clock.monotonic()
        return None

    async def _permitted(self, call: str, stream: str, request: Callable[[], Awaitable[T]]) -> T | None:
        """Return the answer to `request`; None without the permission."""
        if self._clock.monotonic() < self._refused.get(call, 0.0):
            return None
        right = self._client.api_subject(f"{call}.{check_token(stream)}" if stream else call)
        self._client.allow_refusal(right)
        try:
            return await request()
        except Refused as error:
            if self._clock.monotonic() >= self._refused.get(call, 0.0):
                missing = self._client.api_subject(f"{call}.*" if stream else call)
                context = {"right": missing, "code": error.code, "error": str(error)}
                log.info("account right missing", action="account_right_missing", **context)
            self._refused[call] = self._clock.monotonic() + self._retry_s
            return None


def _is_due(stream: AccountStream, inspected_at: float, before: float) -> bool:
    return stream.may_change or inspected_at <= before


async def all_feeds(client: FloeClient, settings: Settings) -> list[FeedSettings]:
    """Return the feeds of the configuration, and those of the account's streams that patterns match now.

    Raises Refused if patterns need to list the streams and may not; Unavailable, OutcomeUnknown, ApiError.
    """
    feeds = [*settings.egress.feeds]
    if not settings.egress.patterns:
        return feeds
    if (streams := await AccountListing(client, settings).read()) is None:
        raise Refused(f"not permitted: {client.api_subject('STREAM.NAMES')}", code="E-NATS-PERMISSION")
    return [*feeds, *plan_account(streams, settings).feeds.values()]
