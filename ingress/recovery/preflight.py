"""The checks of a restore before anything is written: server, account, stream name, subjects and lease.

A dry run makes the same checks and ends with the same errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError, FloeError, Refused, Stopped, Unavailable
from common.exits import choices
from common.nats.api import RESTORE_PREFIX, StreamInfo, account_limits, check_token, list_consumers, query, stream_info
from common.nats.client import FloeClient
from common.nats.kv import state_key
from common.nats.lease import Leases, format_owner
from common.nats.requests import ApiError
from common.settings.types import format_count, size_words
from ingress.recovery.files_form import LOGICAL_MINOR, archive_writer
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import RestorePlan, RestoreRequest
from ingress.recovery.stream_archive import ArchiveWriter

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
    """Check the server. Raises ConfigError if the server, the account or another stream does not permit the restore."""
    version = ".".join(map(str, client.server_version))
    writer = archive_writer(plan.name, version, plan.request.format, force=plan.request.force)
    fitted = plan
    if writer.format == "files" and plan.config.get("storage") == "memory":
        fitted = replace(plan, config={**plan.config, "storage": "file"})
    _check_replicas(client, plan)
    account = await _account(client)
    if (info := await stream_info(client, plan.name)) is not None and not info.restore_marker:
        if not plan.request.promote or not (left := await guarded_consumers(client, plan.name)):
            raise foreign_stream_error(plan.request, info)
        text = f"an earlier restore has brought it back; to do: let {', '.join(left)} deliver again"
        return PreflightResult(plan, writer, (text,), is_promoted=True)
    await _check_room(client, fitted, account, info is not None)
    if plan.request.promote:
        await _check_promotion(client, plan)
        await _check_subjects(client, plan)
    else:
        await _check_removal(client, plan)
    return PreflightResult(fitted, writer, tuple(_server_notes(client, plan, writer, account)))


async def guarded_consumers(client: FloeClient, stream: str) -> dict[str, dict[str, Any]]:
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
        raise running_error(plan.name, format_owner(holder))
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
    """Raise Stopped if the archive holds less than the stream, and the request does not allow that."""
    request = plan.request
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
        freed = (await query(client, f"STREAM.INFO.{check_token(plan.name)}"))["state"].get("bytes") or 0
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
    most = min((each for of in (limits, config) if (each := int(of.get("max_consumers") or 0)) > 0), default=count)
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
    is_limited = any(int(each.get("max_consumers") or 0) > 0 for each in (*account_limits(account), plan.config))
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


def foreign_stream_error(request: RestoreRequest, info: StreamInfo) -> ConfigError:
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


def running_error(name: str, holder: str = "") -> Unavailable:
    """Return the error for a name that another restore holds. `holder`: its owner, empty if not known."""
    by = f", by {holder}" if holder else ""
    return Unavailable(f"stream {name}: another restore fills it now{by}", hint="wait until it is done", code=RUNS_CODE)
