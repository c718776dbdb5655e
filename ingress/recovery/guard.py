"""The stream that a restore fills: the checks before anything is written, its guard, and its promotion.

Checks of server, account, stream name, subjects and lease come first. A dry run makes the same checks and ends with
the same errors.

JetStream deletes and updates any stream that has the name. So one restore at a time holds the lease of a name. Before
it deletes or promotes a stream, it checks the stream for its own marker, or that of an earlier restore. No other stream
is deleted or promoted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from common.clock import Clock, parse_time
from common.errors import ConfigError, FloeError, LeaseLost, OutcomeUnknown, Refused, Stopped, Unavailable, UsageError
from common.exits import choices, nats_command
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import (
    RESTORE_PREFIX,
    StreamInfo,
    account_limits,
    check_token,
    create_consumer,
    delete_stream,
    list_consumers,
    query,
    stream_info,
)
from common.nats.client import FloeClient
from common.nats.kv import state_key
from common.nats.lease import Lease, Leases, format_owner
from common.nats.protocol import ApiError
from common.service.progress import Progress
from common.settings.types import format_count, size_words
from common.tasks import Stop, run_with, wait_for
from ingress.errors import most_important_error
from ingress.recovery.files_form import LOGICAL_MINOR, archive_writer
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import PROMOTION_KEYS, RestorePlan, RestoreRequest
from ingress.recovery.read_back import config_differences, stream_info_json
from ingress.recovery.retention_filter import limit_of
from ingress.recovery.stream_archive import ArchiveWriter, without_guard_subject

log = get_logger(__name__)

T = TypeVar("T")

RUNS_CODE, ROOM_CODE = "E-RESTORE-RUNS", "E-RESTORE-ROOM"
RESTORE_FAILED = 10062  # error of JetStream if it ends a restore


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """The result of the checks. `plan`: adapted to the archive form of `writer`; `notes`: facts that only the server
    knows, as text. `is_promoted`: an earlier restore has promoted the stream, and ended before its push consumers
    delivered again.
    """

    plan: RestorePlan
    writer: ArchiveWriter
    notes: tuple[str, ...]
    is_promoted: bool = False


async def preflight(client: FloeClient, plan: RestorePlan) -> PreflightResult:
    """Check the server. Raises ConfigError if the server, the account or another stream does not permit the restore;
    the errors of `check_lossless`, unless the stream is promoted: its archive may have grown since.
    """
    version = ".".join(map(str, client.server_version))
    writer = archive_writer(plan.name, version, plan.request.format, force=plan.request.force)
    fitted = plan
    if writer.format == "files" and plan.config.get("storage") == "memory":
        fitted = replace(plan, config={**plan.config, "storage": "file"})
    _check_replicas(client, plan)
    account = await _account(client)
    if (info := await stream_info(client, plan.name)) is not None and not info.restore_marker:
        if not plan.request.promote or not (left := await _guarded_consumers(client, plan.name)):
            raise _foreign_stream_error(plan.request, info)
        text = f"an earlier restore has brought it back; to do: let {', '.join(left)} deliver again"
        return PreflightResult(plan, writer, (text,), is_promoted=True)
    check_lossless(plan)
    await _check_room(client, fitted, account, info is not None)
    if plan.request.promote:
        await _check_promotion(client, plan)
        await _check_subjects(client, plan)
    else:
        await _check_removal(client, plan)
    return PreflightResult(fitted, writer, tuple(_server_notes(client, plan, writer, account)))


async def _guarded_consumers(client: FloeClient, stream: str) -> dict[str, dict[str, Any]]:
    """Return the configurations, by name, of the push consumers of a stream that a restore has left muted."""
    found = {str(each["name"]): dict(each["config"]) for each in await list_consumers(client, stream)}
    begin = f"{RESTORE_PREFIX}{stream}."
    return {name: config for name, config in found.items() if config.get("deliver_subject", "").startswith(begin)}


async def dry_run(client: FloeClient, plan: RestorePlan, leases: Leases) -> list[str]:
    """Return, as text, the facts that only the server knows, and the facts that are unknown until the stream is filled.

    Raises the errors of `preflight`, and Unavailable if another restore holds the lease of the name.
    """
    notes = list((await preflight(client, plan)).notes)
    if (holder := await leases.get_owner(state_key("restore", plan.name))) is not None:
        raise _running_error(plan.name, format_owner(holder))
    if any(part.footer.raw_bytes > client.max_payload for part in plan.parts):
        most = size_words(client.max_payload)
        notes.append(f"messages larger than max_payload ({most}) are found only while the stream is filled")
    return notes


def check_effects(plan: RestorePlan, agreed: Collection[str]) -> None:
    """Raise Stopped if the plan has effects on other subjects without permission. `agreed`: the confirmed effects."""
    if (effects := [each for each in plan.elsewhere if each not in agreed]) and not plan.request.allow_elsewhere:
        raise Stopped(
            f"stream {plan.name}: expected no effects outside of its subjects, found {'; '.join(effects)}",
            hint=choices(("if that is intended", repeat_command(replace(plan.request, allow_elsewhere=True)))),
            code="E-RESTORE-ELSEWHERE",
        )


def check_lossless(plan: RestorePlan) -> None:
    """Raise Stopped if the archive holds less than the stream, and the request does not allow that; UsageError if new
    messages would begin before the end of the archive.
    """
    request = plan.request
    if 0 < (request.skip_to or plan.end) < plan.end:
        found = f"expected at least {plan.end}, the end of the archive, found {request.skip_to}"
        raise UsageError(f"--skip-to-sequence: {found}")
    if plan.lossy and not request.allow_lossy:
        raise Stopped(
            f"the archive of {request.site}/{request.feed} is not the whole stream: {'; '.join(plan.lossy[:5])}",
            hint=choices(
                *(
                    (
                        f"{each.feed} reaches further: restore it",
                        repeat_command(replace(request, feed=each.feed, incarnation=None)),
                    )
                    for each in plan.longer_feeds
                    if not each.is_partial
                ),
                ("restore the messages that exist", repeat_command(replace(request, allow_lossy=True))),
            ),
            code="E-RESTORE-LOSSY",
        )


def _check_replicas(client: FloeClient, plan: RestorePlan) -> None:
    replicas = int(plan.config.get("num_replicas") or 1)
    if replicas > 1 and not client.is_clustered:
        raise ConfigError(
            f"stream {plan.name}: had {replicas} replicas, and this server is in no cluster",
            hint=choices(("restore it with one", repeat_command(replace(plan.request, replicas=1)))),
            code="E-RESTORE-REPLICAS",
        )


async def _check_room(client: FloeClient, plan: RestorePlan, account: Mapping[str, Any], leftover: bool) -> None:
    """Raise ConfigError if the limits of the account leave too little room for messages and consumers.

    `leftover`: an earlier restore left a stream, which is removed first.
    """
    replicas = int(plan.config.get("num_replicas") or 1)
    tier, freed = (account.get("tiers") or {}).get(f"R{replicas}"), 0
    if leftover:
        freed = (await stream_info_json(client, plan.name))["state"].get("bytes") or 0
    if (error := room_shortage(plan, tier or account, 1 if tier else replicas, int(freed))) is not None:
        raise error


def room_shortage(plan: RestorePlan, account: Mapping[str, Any], copies: int, freed: int = 0) -> ConfigError | None:
    """Return the error for a limit of the account that `plan` exceeds, None if there is none; pure.

    `account`: as the server describes it, or a tier of it; `copies`: how often it counts the stream; `freed`: bytes of
    the stream that are removed first.
    """
    limits, config = account.get("limits") or {}, plan.config
    storage, key = ("memory", "max_mem") if config.get("storage") == "memory" else ("storage", "max_file")
    limit, size = int(limits.get(f"max_{storage}", -1)), (plan.stored_bytes - freed) * copies
    if 0 <= limit < (wanted := size + int(account.get(storage) or 0)):
        found = f"account: expected {key} of at least {size_words(wanted)}, found {size_words(limit)}"
        return _room_error(plan.request, found)
    count = len(plan.consumers) + int(plan.request.verify != "state" and plan.rows > 0)
    most = min((each for of in (limits, config) if (each := limit_of(of, "max_consumers"))), default=count)
    found = f"stream {plan.name}: expected max_consumers of at least {count}, found {most}"
    return _room_error(plan.request, found, of_consumers=True) if most < count else None


def _room_error(request: RestoreRequest, found: str, *, of_consumers: bool = False) -> ConfigError:
    limits = "of the account (max_file, max_mem, max_streams, max_consumers, disk_max_stream_bytes, max_bytes_required)"
    limits += " or of the server (max_file_store, max_memory_store, default_max_consumers)"
    ends = [(f"make room, or change the limit {limits}; then", repeat_command(request))]
    if of_consumers and request.promote:
        less = ("or without its consumers; create those yourself", replace(request, consumers=False))
        unread = ("or without reading it back", replace(request, verify="state"))
        ends += [(text, repeat_command(each)) for text, each in (less, unread) if each != request]
    return ConfigError(found, hint=choices(*ends), code=ROOM_CODE)


# Errors of the server about a lack of room: limits of the account and of the server.
NO_RESOURCES, TOO_MANY_CONSUMERS, NO_STORAGE = 10023, 10026, 10047
_NO_ROOM = (NO_RESOURCES, TOO_MANY_CONSUMERS, NO_STORAGE, 10002, 10027, 10028, 10113, 10122)
# Consumers of a stream without a limit of its own or of the account, unless the server's configuration sets another.
DEFAULT_MAX_CONSUMERS, DEFAULT_MAX_CONSUMERS_SINCE = 1000, (2, 15)
_NO_ROOM_TEXT = re.compile(r"no space left|disk quota exceeded|not enough space|\((10\d{3})\)", re.IGNORECASE)


def room_error(error: FloeError, request: RestoreRequest, name: str, *, is_clustered: bool) -> ConfigError | None:
    """Return an error with a remedy if `error` reports that the server or the account has no room for the stream or its
    consumers, else None; pure. `is_clustered`: in a cluster, a lack of resources may be temporary.
    """
    number = error.err_code if isinstance(error, ApiError) else 0
    if number == RESTORE_FAILED and (cause := _NO_ROOM_TEXT.search(error.message)) is not None:
        number = int(cause[1] or NO_STORAGE)
    if number not in _NO_ROOM or (number == NO_RESOURCES and is_clustered):
        return None
    return _room_error(request, f"stream {name}: no room: {error.message}", of_consumers=number == TOO_MANY_CONSUMERS)


async def _account(client: FloeClient) -> dict[str, Any]:
    """Return the limits and the usage of the account. Raises ConfigError if it has no JetStream."""
    try:
        return await query(client, "INFO")
    except FloeError as error:
        from common.doctor import NO_JETSTREAM, jetstream_account

        if error.code in NO_JETSTREAM:
            await jetstream_account(client)  # raises an error with a hint
        raise


async def _check_promotion(client: FloeClient, plan: RestorePlan) -> None:
    """Raise Refused without the right to update the stream, which the promotion needs. The update that checks it has an
    empty configuration, so the server never applies it.
    """
    with suppress(ApiError):
        await query(client, f"STREAM.UPDATE.{check_token(plan.name)}", {})


async def _check_removal(client: FloeClient, plan: RestorePlan) -> None:
    """Raise Refused without the rights to delete the stream of a drill and the consumer that reads it. The requests use
    names that do not exist.
    """
    name = f"{check_token(plan.name)}-none"
    for request in (f"CONSUMER.DELETE.{name}.none", f"STREAM.DELETE.{name}"):
        with suppress(ApiError):
            await query(client, request)


async def _check_subjects(client: FloeClient, plan: RestorePlan) -> None:
    """Raise ConfigError if another stream has one of the subjects. Without the right to ask, promotion checks it."""
    for subject in plan.config.get("subjects") or []:
        try:
            answer = await query(client, "STREAM.NAMES", {"subject": subject})
        except Refused:
            return
        if others := sorted({*map(str, answer.get("streams") or [])} - {plan.name}):
            raise ConfigError(
                f"stream {plan.name}: expected subject {subject} to be free, found it in stream {others[0]}",
                hint=choices(
                    ("restore it with other subjects", beside(plan.request)),
                    (f"or remove the subject from {others[0]}; then", repeat_command(plan.request)),
                ),
                code="E-RESTORE-SUBJECTS",
            )


def _server_notes(
    client: FloeClient, plan: RestorePlan, writer: ArchiveWriter, account: Mapping[str, Any]
) -> Iterator[str]:
    """Yield, as text, the deviations that this server causes."""
    is_limited = any(limit_of(each, "max_consumers") for each in (*account_limits(account), plan.config))
    count, most = len(plan.consumers), DEFAULT_MAX_CONSUMERS
    if count >= most and not is_limited and client.server_version >= DEFAULT_MAX_CONSUMERS_SINCE:
        unless = "unless its default_max_consumers (in jetstream: limits) is higher"
        yield f"{count} consumers, and one to read the stream back: this server accepts {most:,} a stream, {unless}"
    # Since 2.15, a stream that sources from another one recognises it by its creation time.
    is_new = client.server_version >= LOGICAL_MINOR and (writer.format == "logical" or client.is_clustered)
    if is_new and plan.request.promote and plan.rows and not plan.is_renamed:
        way = "" if client.is_clustered else "; --format files prevents that"
        yield (
            "this nats-server creates a new stream: living streams that source from it read it from the beginning "
            f"again, and get its messages twice{way}"
        )
    if writer.format != "files":
        return
    for consumer in plan.consumers:
        if consumer.config.get("mem_storage"):
            yield f"consumer {consumer.name} is kept in memory: this server starts it from its beginning"
    if plan.config.get("storage") == "memory":
        yield "the stream was kept in memory: this server takes it back on disk only"


# Obstacles


def beside(request: RestoreRequest) -> str:
    """Return the command for a stream with another name and subjects of its own."""
    name = f"{request.name or request.feed}_RESTORED"
    return repeat_command(replace(request, name=name, subjects=(f"{name}.>",)))


def _foreign_stream_error(request: RestoreRequest, info: StreamInfo) -> ConfigError:
    """Return the error for a stream of that name that no restore made."""
    return ConfigError(
        f"stream {info.name}: expected none, found one with {format_count(info.messages, 'message')}, created "
        f"{info.created}: it is not touched",
        hint=choices(
            ("restore beside it", beside(request)),
            "or stop what creates it, such as NACK, and delete it yourself, if it is not needed",
        ),
        code="E-RESTORE-EXISTS",
    )


def stopped_error(request: RestoreRequest) -> Unavailable:
    return Unavailable(
        "the restore was stopped before its end",
        hint=choices(("it cannot be continued; begin again", repeat_command(request))),
        code="E-RESTORE-STOPPED",
    )


def _running_error(name: str, holder: str = "") -> Unavailable:
    """Return the error for a name that another restore holds. `holder`: its owner, empty if not known."""
    by = f", by {holder}" if holder else ""
    return Unavailable(f"stream {name}: another restore fills it now{by}", hint="wait until it is done", code=RUNS_CODE)


# The guard

SUBSCRIPTION_EXISTS = 10013  # error of an update of `deliver_subject`: a client subscribes to the current one


async def run_with_renewal(lease: Lease, work: Coroutine[Any, Any, T], lost: LeaseLost | None = None) -> T:
    """Return the result of `work`; renew the lease meanwhile. Raises the most important error of both.

    `lost`: raised once the lease is lost; None if the work checks that itself, where it matters.
    """
    results = list[T]()

    async def main() -> None:
        results.append(await work)

    async def renew() -> None:
        await lease.run_renewals()
        if lost is not None:
            raise lost

    try:
        await run_with(main(), renew())
    except BaseExceptionGroup as errors:
        raise most_important_error(errors) from None
    return results[0]


class GuardedStream:
    """The stream of one attempt, from the removal of a leftover to its promotion. `marker`: of this attempt only."""

    def __init__(self, client: FloeClient, plan: RestorePlan, clock: Clock, progress: Progress, stop: Stop) -> None:
        self._client, self._plan, self._name = client, plan, plan.name
        self._clock, self._progress, self._stop = clock, progress, stop
        self._lease: Lease | None = None
        self.marker = secrets.token_hex(8)

    # The lease of its name

    @asynccontextmanager
    async def hold_lease(self, leases: Leases) -> AsyncIterator[Lease]:
        """Hold the lease of the name during the block. Wait until the lease of a killed restore expires."""
        lease = self._lease = await self._acquire_lease(leases)
        try:
            yield lease
        finally:
            self._lease = None
            await lease.release()

    async def _acquire_lease(self, leases: Leases) -> Lease:
        """Acquire the lease. Raises Unavailable if its holder renews it, and so is alive, or if the restore stops."""
        key, seen = state_key("restore", self._name), dict[bytes, int]()
        while (lease := await leases.acquire(key)) is None:
            if (entry := await leases.kv.get(key)) is None:
                continue
            holder = format_owner(entry.value.decode("utf-8", "backslashreplace"))
            if seen and seen != {entry.value: entry.revision}:
                raise _running_error(self._name, holder)
            if not seen:
                seen[entry.value] = entry.revision
                self._progress.print(f"stream {self._name}: waiting to see if the restore of {holder} is alive")
            if await wait_for(self._stop, min(0.5, leases.ttl / 10)):
                raise stopped_error(self._plan.request)
        return lease

    def check_lease(self) -> None:
        """Raise LeaseLost if the lease is known to be lost. The check is cheap."""
        if self._lease is not None and self._lease.lost.is_set:
            self._require_lease()

    def _require_lease(self) -> None:
        """Raise LeaseLost if another restore may have begun."""
        if self._lease is not None and not self._lease.is_usable():
            raise LeaseLost(
                f"stream {self._name}: the lease of this restore was lost",
                hint=choices(("the same command begins again", repeat_command(self._plan.request))),
                code="E-RESTORE-LEASE",
            )

    # The stream of that name

    async def remove_leftover(self, checks: int, span_s: float) -> None:
        """Check the name `checks` times over `span_s` seconds, and remove the leftover of an earlier restore.

        The pause is also the time in which a running egress notices that the stream is gone, and puts the rows that it
        holds. Without it, a small stream was restored before that, and lacked them.

        Raises ConfigError if another stream has the name, Unavailable if another restore fills it now.
        """
        states = set[tuple[int, int]]()
        for check in range(checks):
            if check:
                await self._clock.sleep(span_s / (checks - 1))
            if (info := await self._find()) is not None:
                states.add((info.messages, info.last_sequence))
        if len(states) > 1:
            raise _running_error(self._name)
        if states:
            self._progress.print(f"removing {self._name}, a leftover of an earlier restore")
            await self.remove("")

    async def remove(self, marker: str) -> None:
        """Remove the stream with this marker; with an empty one, the stream of any restore. Raises LeaseLost,
        ConfigError for a stream without a marker, and the errors of the server.
        """
        info = await self._find()
        if info is not None and info.restore_marker.startswith(marker):
            self._require_lease()
            await delete_stream(self._client, self._name, timeout=30.0)

    async def _find(self) -> StreamInfo | None:
        """Return the stream of this name; None if there is none. Raises ConfigError if no restore made it."""
        info = await stream_info(self._client, self._name)
        if info is not None and not info.restore_marker:
            raise _foreign_stream_error(self._plan.request, info)
        return info

    async def read_filled(self) -> StreamInfo:
        """Return the stream that this attempt filled. Its `created` may change with its leader: in a cluster, only the
        server that received the archive reports the time at which it made the stream, or the time that it kept from the
        archive. The other servers report the time of the request.

        Raises Stopped if it is gone, ConfigError if another stream has its name, Unavailable if another restore fills
        the stream of that name.
        """
        if (info := await self._find()) is None:
            raise Stopped(
                f"stream {self._name}: expected the stream just restored, found none: it was deleted",
                hint=choices(("begin again", repeat_command(self._plan.request))),
                code="E-RESTORE-EXISTS",
            )
        if not info.restore_marker.startswith(self.marker):
            raise _running_error(self._name)
        return info

    # Promotion

    async def promote(self, filled: StreamInfo, config: Mapping[str, Any]) -> list[str]:
        """Give the stream its final configuration, `config`. `filled`: the stream as it was just before.

        Returns, as text, the keys that only a promotion sets and that the server did not keep. Raises ConfigError if
        the server refuses the configuration, Stopped if another stream got it.
        """
        self._require_lease()
        name, plan = self._name, self._plan
        try:
            await self._client.api(f"STREAM.UPDATE.{check_token(name)}", dict(config), timeout=30.0)
        except OutcomeUnknown:
            if (info := await stream_info(self._client, name)) is None or info.restore_marker:
                raise
        except ApiError as error:
            raise ConfigError(
                f"stream {name}: the server refuses its configuration: {error.description}",
                hint=choices(
                    f"stream {name} is restored and compared, and stays under its guard: no publisher reaches it",
                    ("solve that; the same command removes it and begins again", repeat_command(plan.request)),
                    ("or remove it", nats_command("stream rm", name)),
                ),
                code="E-RESTORE-PROMOTE",
            ) from error
        await self._check_promoted(filled)
        log.info("stream restored", action="stream_restored", stream=name, last=plan.last_sequence)
        later = {key: value for key, value in config.items() if key in PROMOTION_KEYS}
        found = (await stream_info_json(self._client, name))["config"]
        return [f"configuration: {text}" for text in config_differences(later, found)]

    async def restore_delivery(self) -> list[str]:
        """Give the push consumers of the promoted stream their own delivery subjects. Return the consumer names.

        Raises ConfigError if the server refuses one because a client subscribes to its subject under the guard, for
        example with `>`.
        """
        guarded, refused = await _guarded_consumers(self._client, self._name), list[str]()
        for name, config in guarded.items():
            self._require_lease()
            try:
                found = {**config, "deliver_subject": without_guard_subject(config["deliver_subject"])}
                await create_consumer(self._client, self._name, found, "update")
            except OutcomeUnknown:
                if name in await _guarded_consumers(self._client, self._name):
                    raise
            except ApiError as error:
                if error.err_code != SUBSCRIPTION_EXISTS:
                    raise
                refused.append(name)
            failpoint("restore.delivering")
        if refused:
            raise ConfigError(
                f"stream {self._name}: is back and in use, but {', '.join(refused)} cannot deliver yet: expected "
                f"no subscription to {RESTORE_PREFIX}{self._name}.>, found one, such as to `>`",
                hint=choices(("end it for a moment; the same command continues", repeat_command(self._plan.request))),
                code="E-RESTORE-DELIVER",
            )
        return [*guarded]

    async def _check_promoted(self, filled: StreamInfo) -> None:
        """Raise Stopped if another stream than the compared one got the configuration: in a cluster, one that was
        created after `filled` was read.
        """
        info, end, created = await stream_info(self._client, self._name), self._plan.last_sequence, filled.created
        is_it = info is not None and (
            info.created == created or (info.leader and parse_time(info.created) < parse_time(filled.time))
        )
        if info is None or not is_it or info.last_sequence < end:
            found = f"one created {info.created} up to {info.last_sequence}" if info else "none"
            raise Stopped(
                f"stream {self._name}: expected the restored one, created {created} up to {end}, found {found}: "
                "it was replaced while it was promoted",
                hint=choices(
                    "check its messages and its creator; then",
                    ("delete it, and begin again", repeat_command(self._plan.request)),
                ),
                code="E-RESTORE-REPLACED",
            )
