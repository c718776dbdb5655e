"""Streams and consumers as the JetStream API describes them. All reads go to the leader."""

import asyncio
import base64
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from common.clock import parse_time
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.jetstream.client import FloeClient
from common.jetstream.requests import ApiError
from common.segments.segment import Message
from common.sequences import SequenceRange

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
MESSAGE_NOT_FOUND = 10037

# A stream that `floe restore` fills: its only subject, before its name, and the key in its metadata.
GUARD = "_floe.restore."
MARKER = "floe.restore"

MAX_BYTES_REQUIRED = 10113  # the account takes no stream without max_bytes
IDLES_TOO_LONG = 10153  # inactive_threshold is above the one in the stream's consumer_limits

ATTEMPTS = 3  # of a question whose answer was lost


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What STREAM.INFO says of a stream; a leader that was deposed and does not know it yet may answer too.

    `first_sequence`, `last_sequence`: 0 where the stream never held a message; `first_sequence` is above
    `last_sequence` where it is empty now. `deleted`: how many sequences between the two it does not hold. `created`,
    `first_timestamp`, `last_timestamp`: RFC 3339, as given. `leader`: empty on a single server and where there is none
    now. `time`: the server's, when it answered; empty before 2.10.
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
    def marker(self) -> str:
        """What a restore that is not done says of itself; empty for any other stream."""
        return str((self.config.get("metadata") or {}).get(MARKER) or "")


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """What CONSUMER.INFO says of a consumer; sequences are 0 before the first message.

    `stream_sequence`, `consumer_sequence`: of the last message delivered; `pending`: matching messages that
    were not delivered yet, by the consumer's leader. `ack_floor`: the consumer sequence up to which every
    message is acknowledged, `acknowledged`: the stream sequence of that one; `ack_pending`: how many were
    delivered and are not acknowledged. `leader`: as of StreamInfo.
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
        """The messages that a pull request may ask for, 0: as many as it likes; the server's limit counts too."""
        return int(self.config.get("max_batch") or 0)


async def ask(
    client: FloeClient, name: str, request: dict[str, Any] | None = None, *, timeout: float = 5.0
) -> dict[str, Any]:
    """Asks a question that changes nothing, so a lost answer is asked for again.

    Raises Unavailable where no answer comes within `timeout` seconds, else as `FloeClient.api`.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            for _ in range(ATTEMPTS):
                with suppress(OutcomeUnknown):
                    return await client.api(name, request, timeout=timeout)
    raise Unavailable(f"no answer to {client.api_subject(name)} within {timeout:g} s")


async def find(
    client: FloeClient, name: str, *absent: int, request: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """As `ask`; None where JetStream answers with one of the errors `absent`."""
    try:
        return await ask(client, name, request)
    except ApiError as error:
        if error.err_code in absent:
            return None
        raise


async def stream_info(client: FloeClient, stream: str) -> StreamInfo | None:
    """None if there is no such stream."""
    answer = await find(client, f"STREAM.INFO.{token(stream)}", STREAM_NOT_FOUND)
    return None if answer is None else _stream_info(answer)


RESTORING = "E-RESTORING"


async def unguarded_info(client: FloeClient, stream: str) -> StreamInfo | None:
    """As `stream_info`. Raises Unavailable too while `floe restore` fills the stream: it cannot be judged yet."""
    if (info := await stream_info(client, stream)) is not None and info.marker:
        raise Unavailable(
            f"stream {info.name} is being restored ({info.marker})",
            hint="nothing to do, it goes on by itself when that is done; if it never is, give the restore again",
            code=RESTORING,
        )
    return info


async def deleted_sequences(client: FloeClient, stream: str) -> tuple[StreamInfo, list[int]] | None:
    """With the sequences between the first and the last that the stream does not hold, ascending. None if there is no
    such stream. Raises DataError for an answer of another form.
    """
    request = {"deleted_details": True}
    answer = await find(client, f"STREAM.INFO.{token(stream)}", STREAM_NOT_FOUND, request=request)
    if answer is None:
        return None
    info = _stream_info(answer)
    try:
        # A server says 0 of a stream that never held a message.
        return info, sorted(filter(None, map(_count, answer["state"].get("deleted") or [])))
    except (TypeError, ValueError) as error:
        raise DataError(f"STREAM.INFO: expected deleted sequences, found {error!r:.80}") from None


async def most_replicas(client: FloeClient, streams: Iterable[str]) -> int:
    """The replicas of the most replicated of the streams; 1 where none of them exists."""
    found = [await stream_info(client, stream) for stream in sorted(set(streams))]
    return max((int(info.config.get("num_replicas", 1)) for info in found if info), default=1)


async def create_stream(client: FloeClient, config: dict[str, Any], max_bytes: int = 0) -> StreamInfo:
    """Creates the stream `config["name"]`; the same configuration again changes nothing. Raises ApiError.

    `max_bytes`: of the stream where the account takes none without; 0: that is refused then.
    """
    try:
        return _stream_info(await client.api(f"STREAM.CREATE.{token(config['name'])}", config))
    except ApiError as error:
        if error.err_code != MAX_BYTES_REQUIRED or not max_bytes:
            raise
    return await create_stream(client, {**config, "max_bytes": max_bytes})


async def delete_stream(client: FloeClient, stream: str, timeout: float = 5.0) -> bool:
    """False if it did not exist."""
    try:
        await client.api(f"STREAM.DELETE.{token(stream)}", timeout=timeout)
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        return False
    return True


async def next_message(client: FloeClient, stream: str, sequence: int, filter_subject: str = "") -> Message | None:
    """The first message at or after `sequence` that the filter takes (empty: any); None if there is none.

    Raises ApiError where there is no such stream.
    """
    request = {"seq": sequence, "next_by_subj": filter_subject or ">"}
    return await message_of(client, stream, request)


async def message_of(client: FloeClient, stream: str, request: dict[str, Any]) -> Message | None:
    """None if there is no such message."""
    answer = await find(client, f"STREAM.MSG.GET.{token(stream)}", MESSAGE_NOT_FOUND, request=request)
    return None if answer is None else stored_message(answer)


async def absent(client: FloeClient, stream: str, within: SequenceRange) -> list[SequenceRange]:
    """The sequences of `within` that the stream does not hold; one request for each that it holds.

    Raises ApiError where there is no such stream.
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
    """The message in an answer of STREAM.MSG.GET. Raises DataError."""
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


async def create_consumer(
    client: FloeClient, stream: str, config: dict[str, Any], action: str = "create"
) -> ConsumerInfo:
    """Creates the consumer `config["name"]` (or `durable_name`). `action`: `update` for one that must exist.

    Raises ApiError, also where one of that name exists with another configuration.
    """
    name = token(config.get("name") or config["durable_name"])
    subject = f"CONSUMER.CREATE.{token(stream)}.{name}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    request = {"stream_name": stream, "config": {"name": name, **config}, "action": action}
    return _consumer_info(await client.api(subject, request))


async def create_ephemeral(client: FloeClient, stream: str, config: dict[str, Any]) -> ConsumerInfo:
    """As `create_consumer`, for a consumer with an `inactive_threshold` (ns) that ends with its reader: where the
    stream's `consumer_limits` allow less, it has theirs.
    """
    try:
        return await create_consumer(client, stream, config)
    except ApiError as error:
        info = await stream_info(client, stream) if error.err_code == IDLES_TOO_LONG else None
        most = int((info.config.get("consumer_limits") or {}).get("inactive_threshold") or 0) if info else 0
        if not 0 < most < config["inactive_threshold"]:
            raise
    return await create_consumer(client, stream, {**config, "inactive_threshold": most})


async def consumer_info(client: FloeClient, stream: str, consumer: str) -> ConsumerInfo | None:
    """None if the stream or the consumer does not exist."""
    name = f"CONSUMER.INFO.{token(stream)}.{token(consumer)}"
    answer = await find(client, name, STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)
    return None if answer is None else _consumer_info(answer)


async def consumer_names(client: FloeClient, stream: str) -> list[str]:
    """Raises ApiError where there is no such stream."""
    names: list[str] = []
    while True:
        answer = await ask(client, f"CONSUMER.NAMES.{token(stream)}", {"offset": len(names)})
        page = answer.get("consumers") or []
        names += map(str, page)
        if not page or len(names) >= int(answer.get("total", 0)):
            return names


async def list_consumers(client: FloeClient, stream: str) -> list[dict[str, Any]]:
    """What CONSUMER.LIST says of every consumer, as it says it, each once.

    Raises ApiError where there is no such stream, Unavailable where a consumer's leader did not answer the server.
    """
    found: dict[str, dict[str, Any]] = {}
    asked = 0
    while True:
        answer = await ask(client, f"CONSUMER.LIST.{token(stream)}", {"offset": asked})
        if missing := answer.get("missing"):
            raise Unavailable(f"CONSUMER.LIST of {stream}: no answer of {', '.join(map(str, missing))[:200]}")
        page = answer.get("consumers") or []
        found |= {str(each.get("name")): each for each in page}
        asked += len(page)
        if not page or asked >= int(answer.get("total", 0)):
            return list(found.values())


async def delete_consumer(client: FloeClient, stream: str, consumer: str) -> bool:
    """False if it did not exist."""
    try:
        await client.api(f"CONSUMER.DELETE.{token(stream)}.{token(consumer)}")
    except ApiError as error:
        if error.err_code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
            return False
        raise
    return True


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


def token(name: str) -> str:
    """`name`, if it is one token of an API subject; else raises ValueError."""
    if not re.fullmatch(r"[^\s.*>/\\\x00-\x1f\x7f]+", name):
        raise ValueError(f"name {name!r}: expected no space . * > / or \\")
    return name
