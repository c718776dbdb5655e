"""Streams and consumers through the JetStream API. All reads go to the leader."""

import asyncio
import base64
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from common.archive.segment import Message
from common.clock import NS_PER_S, parse_time
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.nats.client import FloeClient
from common.nats.protocol import ApiError
from common.sequences import SequenceRange

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
MESSAGE_NOT_FOUND = 10037

# For a stream that `floe restore` fills: the prefix of its only subject (the stream's name follows), and the key in
# its metadata.
RESTORE_PREFIX = "_floe.restore."
RESTORE_KEY = "floe.restore"
BUCKET_KEY = "floe.bucket"  # in the metadata of a bucket of Floe; buckets that were made before it have none
SCRATCH_PREFIX = "FLOE_DRILL_"  # of the names of a drill's streams

MAX_BYTES_REQUIRED = 10113  # the account refuses a stream without max_bytes
INACTIVE_THRESHOLD_TOO_LONG = 10153  # inactive_threshold is above the limit in the stream's consumer_limits
TOO_MANY_CONSUMERS = 10026

QUERY_ATTEMPTS = 3  # at a read request, if its answer is lost


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The answer to STREAM.INFO. It may come from a former leader that does not know yet that it was deposed.

    `first_sequence`, `last_sequence`: 0 if the stream never held a message; `first_sequence` is above `last_sequence`
    if the stream is empty now. `deleted`: the number of sequences between the two that the stream does not hold.
    `created`, `first_timestamp`, `last_timestamp`: RFC 3339, as received. `leader`: empty on a single server, and if
    there is no leader now. `time`: the server's clock at the answer; empty before 2.10.
    """

    name: str
    created: str
    config: dict[str, Any] = field(hash=False)
    first_sequence: int
    last_sequence: int
    messages: int
    first_timestamp: str
    last_timestamp: str
    leader: str
    time: str = ""
    deleted: int = 0

    @property
    def restore_marker(self) -> str:
        """The restore's own marker in the metadata while `floe restore` fills the stream; empty otherwise."""
        return self._metadata(RESTORE_KEY)

    @property
    def is_bucket_of_floe(self) -> bool:
        """True if it is marked as a bucket for the state or the leases of a Floe."""
        return bool(self._metadata(BUCKET_KEY))

    def _metadata(self, key: str) -> str:
        return str((self.config.get("metadata") or {}).get(key) or "")


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """The answer to CONSUMER.INFO. Sequences are 0 before the first message.

    `stream_sequence`, `consumer_sequence`: of the last message delivered. `pending`: the number of matching messages
    not yet delivered, as counted by the consumer's leader. `ack_floor`: the consumer sequence up to which every message
    is acknowledged; `acknowledged`: the stream sequence of the same message. `ack_pending`: the number of messages that
    are delivered and not acknowledged. `leader`: as in `StreamInfo`.
    """

    name: str
    created: str
    config: dict[str, Any] = field(hash=False)
    stream_sequence: int
    consumer_sequence: int
    pending: int
    ack_floor: int = 0
    ack_pending: int = 0
    acknowledged: int = 0
    leader: str = ""

    @property
    def max_batch(self) -> int:
        """The most messages that one pull request may ask for; 0: no limit. The server's own limit applies too."""
        return int(self.config.get("max_batch") or 0)


async def query(
    client: FloeClient, name: str, request: dict[str, Any] | None = None, *, timeout: float = 5.0
) -> dict[str, Any]:
    """Send a request that changes nothing and return the answer; if the answer is lost, send the request again.

    Raises Unavailable if no answer comes within `timeout` seconds or in `QUERY_ATTEMPTS` attempts, otherwise as
    `FloeClient.api`.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            for _ in range(QUERY_ATTEMPTS):
                with suppress(OutcomeUnknown):
                    return await client.api(name, request, timeout=timeout)
    raise Unavailable(f"no answer to {client.api_subject(name)} within {timeout:g} s")


async def query_or_none(
    client: FloeClient, name: str, *not_found: int, request: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Call `query`; return None if JetStream answers with one of the error codes `not_found`."""
    try:
        return await query(client, name, request)
    except ApiError as error:
        if error.err_code in not_found:
            return None
        raise


async def stream_info(client: FloeClient, stream: str) -> StreamInfo | None:
    """Return the stream's state and configuration, or None if there is no such stream."""
    answer = await query_or_none(client, f"STREAM.INFO.{check_token(stream)}", STREAM_NOT_FOUND)
    return None if answer is None else _stream_info(answer)


RESTORING_CODE = "E-RESTORING"


async def ready_stream_info(client: FloeClient, stream: str) -> StreamInfo | None:
    """Call `stream_info`. Raises Unavailable also while `floe restore` fills the stream: its content is incomplete."""
    if (info := await stream_info(client, stream)) is not None and info.restore_marker:
        raise Unavailable(
            f"stream {info.name} is being restored ({info.restore_marker})",
            hint="nothing to do: it continues by itself after the restore; if that never ends, run it again",
            code=RESTORING_CODE,
        )
    return info


async def deleted_sequences(client: FloeClient, stream: str) -> tuple[StreamInfo, list[int]] | None:
    """Return the stream's info and, ascending, the sequences between its first and last that it does not hold. None if
    there is no such stream. Raises DataError if the answer has another form.
    """
    request = {"deleted_details": True}
    answer = await query_or_none(client, f"STREAM.INFO.{check_token(stream)}", STREAM_NOT_FOUND, request=request)
    if answer is None:
        return None
    info = _stream_info(answer)
    try:
        # A server lists sequence 0 as deleted if the stream never held a message.
        return info, sorted(filter(None, map(_count, answer["state"].get("deleted") or [])))
    except (TypeError, ValueError) as error:
        raise DataError(f"STREAM.INFO: expected deleted sequences, found {error!r:.80}") from None


async def create_stream(client: FloeClient, config: dict[str, Any], max_bytes: int = 0) -> StreamInfo:
    """Create the stream `config["name"]`; the same configuration again changes nothing. Raises ApiError.

    `max_bytes`: set on the stream if the account refuses one without it; 0: raise that refusal.
    """
    try:
        return _stream_info(await client.api(f"STREAM.CREATE.{check_token(config['name'])}", config))
    except ApiError as error:
        if error.err_code != MAX_BYTES_REQUIRED or not max_bytes:
            raise
    return await create_stream(client, {**config, "max_bytes": max_bytes})


async def delete_stream(client: FloeClient, stream: str, timeout: float = 5.0) -> None:
    """Delete the stream; do nothing if it does not exist."""
    await _delete(client, f"STREAM.DELETE.{check_token(stream)}", STREAM_NOT_FOUND, timeout=timeout)


async def next_message(client: FloeClient, stream: str, sequence: int, filter_subject: str = "") -> Message | None:
    """Return the first message at or after `sequence` that matches the filter (empty: any); None if there is none.

    Raises ApiError if there is no such stream.
    """
    return await query_message(client, stream, {"seq": sequence, "next_by_subj": filter_subject or ">"})


async def query_message(client: FloeClient, stream: str, request: dict[str, Any], *not_found: int) -> Message | None:
    """Return the message that a STREAM.MSG.GET request names; None if there is no such message, or if JetStream answers
    with one of the error codes `not_found`.
    """
    call = f"STREAM.MSG.GET.{check_token(stream)}"
    answer = await query_or_none(client, call, MESSAGE_NOT_FOUND, *not_found, request=request)
    return None if answer is None else stored_message(answer)


async def missing_sequences(client: FloeClient, stream: str, within: SequenceRange) -> list[SequenceRange]:
    """Return the sequences of `within` that the stream does not hold. Sends about one request for each that it holds.

    Raises ApiError if there is no such stream.
    """
    found, position = [], within.first
    while position <= within.last:
        message = await next_message(client, stream, position)
        held = within.last + 1 if message is None else min(message.sequence, within.last + 1)
        if held > position:
            found.append(SequenceRange(position, held - 1))
        position = held + 1
    return found


def stored_message(answer: dict[str, Any]) -> Message:
    """Return the message in an answer to STREAM.MSG.GET. Raises DataError."""
    try:
        stored = answer["message"]
        headers = stored.get("hdrs")
        return Message(
            sequence=int(stored["seq"]),
            timestamp_ns=parse_time(stored["time"]),
            subject=stored["subject"].encode(),
            headers=None if headers is None else base64.b64decode(headers),
            payload=base64.b64decode(stored.get("data") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"STREAM.MSG.GET: expected a message, found {error!r:.80}") from None


def account_limits(account: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits in an answer to INFO: of the account, and of its tiers, which then has its limits there."""
    return [each.get("limits") or {} for each in (account, *(account.get("tiers") or {}).values())]


async def create_consumer(
    client: FloeClient, stream: str, config: dict[str, Any], action: str = "create"
) -> ConsumerInfo:
    """Create the consumer `config["name"]` (or `durable_name`). `action`: `update` for a consumer that must exist.

    Raises ApiError, also if a consumer of that name exists with another configuration.
    """
    name = check_token(config.get("name") or config["durable_name"])
    subject = f"CONSUMER.CREATE.{check_token(stream)}.{name}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    request = {"stream_name": stream, "config": {"name": name, **config}, "action": action}
    try:
        return _consumer_info(await client.api(subject, request))
    except ApiError as error:
        if error.err_code == TOO_MANY_CONSUMERS:
            owners = "max_consumers of the stream or the account, or default_max_consumers of the server"
            error.hint = f"raise {owners} (in jetstream: limits; 1,000 a stream since 2.15)"
        raise


async def create_ephemeral_consumer(client: FloeClient, stream: str, config: dict[str, Any]) -> ConsumerInfo:
    """Create a consumer with an `inactive_threshold` (ns), so that it ends with its reader; if the stream's
    `consumer_limits` allow less, the consumer gets that limit. Otherwise as `create_consumer`.
    """
    try:
        return await create_consumer(client, stream, config)
    except ApiError as error:
        info = await stream_info(client, stream) if error.err_code == INACTIVE_THRESHOLD_TOO_LONG else None
        limit = int((info.config.get("consumer_limits") or {}).get("inactive_threshold") or 0) if info else 0
        if not 0 < limit < config["inactive_threshold"]:
            raise
    return await create_consumer(client, stream, {**config, "inactive_threshold": limit})


async def consumer_info(client: FloeClient, stream: str, consumer: str) -> ConsumerInfo | None:
    """Return the consumer's state and configuration; None if the stream or the consumer does not exist."""
    name = f"CONSUMER.INFO.{check_token(stream)}.{check_token(consumer)}"
    answer = await query_or_none(client, name, STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)
    return None if answer is None else _consumer_info(answer)


async def consumer_names(client: FloeClient, stream: str) -> list[str]:
    """Return the names of the stream's consumers. Raises as `list_consumers`."""
    return [str(name) for name in await _read_pages(client, f"CONSUMER.NAMES.{check_token(stream)}", "consumers")]


async def list_consumers(client: FloeClient, stream: str) -> list[dict[str, Any]]:
    """Return the entry of every consumer in CONSUMER.LIST, unchanged and each once.

    Raises ApiError if there is no such stream, Unavailable if a consumer's leader did not answer the server.
    """
    pages = await _read_pages(client, f"CONSUMER.LIST.{check_token(stream)}", "consumers")
    return list({str(each.get("name")): each for each in pages}.values())


async def stream_names(client: FloeClient) -> list[str]:
    """Return the names of the account's streams, ascending. Raises Refused without the permission."""
    return sorted({str(name) for name in await _read_pages(client, "STREAM.NAMES", "streams")})


async def _read_pages(client: FloeClient, call: str, key: str) -> list[Any]:
    """Return the entries at `key` on all pages of `call`."""
    found: list[Any] = []
    while True:
        answer = await query(client, call, {"offset": len(found)})
        if missing := answer.get("missing"):
            raise Unavailable(f"{call}: no answer from {', '.join(map(str, missing))[:200]}")
        page = answer.get(key) or []
        found += page
        if not page or len(found) >= int(answer.get("total", 0)):
            return found


async def delete_consumer(client: FloeClient, stream: str, consumer: str) -> None:
    """Delete the consumer; do nothing if the consumer or the stream does not exist."""
    name = f"CONSUMER.DELETE.{check_token(stream)}.{check_token(consumer)}"
    await _delete(client, name, STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)


async def _delete(client: FloeClient, name: str, *not_found: int, timeout: float = 5.0) -> None:
    """Send a request that deletes. JetStream may answer with one of the error codes `not_found`: nothing is there."""
    try:
        await client.api(name, timeout=timeout)
    except ApiError as error:
        if error.err_code not in not_found:
            raise


def _stream_info(answer: dict[str, Any]) -> StreamInfo:
    try:
        state, config = answer["state"], answer["config"]
        return StreamInfo(
            name=str(config["name"]),
            created=str(answer["created"]),
            config=dict(config),
            first_sequence=_count(state["first_seq"]),
            last_sequence=_count(state["last_seq"]),
            messages=_count(state["messages"]),
            first_timestamp=str(state.get("first_ts", "")),
            last_timestamp=str(state.get("last_ts", "")),
            leader=str((answer.get("cluster") or {}).get("leader") or ""),
            time=str(answer.get("ts", "")),
            deleted=_count(state.get("num_deleted", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"STREAM.INFO: expected a stream, found {error!r:.80}") from None


def _consumer_info(answer: dict[str, Any]) -> ConsumerInfo:
    try:
        delivered = answer.get("delivered") or {}
        return ConsumerInfo(
            name=str(answer["name"]),
            created=str(answer["created"]),
            config=dict(answer["config"]),
            stream_sequence=_count(delivered.get("stream_seq", 0)),
            consumer_sequence=_count(delivered.get("consumer_seq", 0)),
            pending=_count(answer.get("num_pending", 0)),
            ack_floor=_count((answer.get("ack_floor") or {}).get("consumer_seq", 0)),
            ack_pending=_count(answer.get("num_ack_pending", 0)),
            acknowledged=_count((answer.get("ack_floor") or {}).get("stream_seq", 0)),
            leader=str((answer.get("cluster") or {}).get("leader") or ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"CONSUMER.INFO: expected a consumer, found {error!r:.80}") from None


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a count, found {value!r:.40}")
    return value


def check_token(name: str) -> str:
    """Return `name` if it is one token of an API subject. Raises ValueError otherwise."""
    if not re.fullmatch(r"[^\s.*>/\\\x00-\x1f\x7f]+", name):
        raise ValueError(f"name {name!r}: expected no space . * > / or \\")
    return name


# The durables that egress uses on interest streams and work queues: one for each of its sessions. `floe restore` makes
# one at the sequence that egress will read next, since an interest stream keeps nothing for a consumer that is missing.

LIMITS, INTEREST, WORK_QUEUE = "limits", "interest", "workqueue"
# Seconds. A message that is delivered again while it is still being read resets the reader, so this exceeds the
# longest time that a message may wait for its segment, a lease and an upload together.
ACK_WAIT_S = 7 * 86_400.0
# The first server version to get ack policy `all`; 2.10.26, 2.11.11 and 2.12.8 cannot use it.
ACK_ALL_MIN_VERSION = (2, 15, 0)
DURABLE_DESCRIPTION = "Floe egress; replaced by each of its sessions"
DURABLE_SUFFIX_BYTES = 4  # bytes at the end of a name


def durable_name_prefix(site: str, feed: str, partition: int) -> str:
    """Return the prefix of the names of a partition's durables; a random suffix follows.

    The prefix is a legal name and unique: the hashes distinguish sites and feeds with the same joined names (`A_1` and
    `B`, `A` and `1_B`).
    """
    mark = name_hash(site) + name_hash(f"{site}/{feed}/{partition}")
    return f"floe_{site}_{re.sub('[^A-Za-z0-9_-]', '-', feed)[:100]}_{partition}_{mark}"


def name_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def durable_config(
    name: str, retention: str, first_sequence: int, filter_subject: str, version: tuple[int, int, int]
) -> dict[str, Any]:
    """Return the configuration of a consumer that outlives its reader, with storage and replicas like the stream's.

    `name`: without the random suffix. `first_sequence`: used on an interest stream only. `version`: the server's. Older
    servers keep the messages before the first sequence for a durable that acknowledges all up to a message: they assume
    that it still wants them. So there each message is acknowledged explicitly.
    """
    if retention == INTEREST:
        policy = "all" if version >= ACK_ALL_MIN_VERSION else "explicit"
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": first_sequence, "ack_policy": policy}
    else:
        start = {"deliver_policy": "all", "ack_policy": "explicit"}
    return {
        "durable_name": f"{name}_{secrets.token_hex(DURABLE_SUFFIX_BYTES)}",
        "description": DURABLE_DESCRIPTION,
        "ack_wait": int(ACK_WAIT_S * NS_PER_S),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "replay_policy": "instant",
        **start,
        **({"filter_subject": filter_subject} if filter_subject else {}),
    }
