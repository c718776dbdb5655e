"""Small state in a JetStream key-value bucket (ADR-8), changed by compare-and-set and read from the leader.

The buckets are those that the `nats kv` command shows. nats-py's own key-value object is not used: it reads by direct
gets, which any replica answers from its own copy, and it treats a lost acknowledgement as a failure.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Generic, Protocol, Self, TypeVar

from common.archive.segment import Message
from common.clock import NS_PER_S
from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Stopped, Unavailable
from common.nats.api import (
    BUCKET_KEY,
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    create_stream,
    query,
    stored_message,
    stream_info,
    stream_names,
)
from common.nats.client import FloeClient, RawSubscription, connect
from common.nats.headers import build_block, header_value
from common.nats.protocol import NO_RESPONDERS_CODE, WRONG_LAST_SEQUENCE_CODES, ApiError, api_error
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings
from common.settings.root import Settings
from common.settings.service import API_PREFIX, ServiceSettings
from common.tasks import ReportError, raise_fatal

STREAM_NAME_IN_USE = 10058
MAX_BYTES_TOO_LARGE = 10122  # max_bytes, for a stream of the account
STATE_MAX_BYTES = 64 * 2**20  # max_bytes of a bucket, if the account requires a limit
KV_TIMEOUT_S = 5.0  # seconds
PARALLEL_KEY_READS = 64
WRITE_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.4)  # seconds before a write that no server received is sent again
MAX_SUBJECTS_PER_INFO = 100_000  # the server's limit on subjects in one STREAM.INFO

T = TypeVar("T")

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_FOREIGN = re.compile(rb"[^-_a-zA-Z0-9]")


#: Replicas of a bucket; a function is called only if the bucket is created.
Replicas = int | Callable[[], Awaitable[int]]


class BucketDeleted(Unavailable):
    """The bucket was deleted. Its former content is unknown: do not treat it as an empty bucket."""

    default_code = "E-KV-BUCKET"


class BucketFull(Stopped):
    """A write exceeds the bucket's `max_bytes`, or a new bucket exceeds the limits of its account: nothing was done."""

    default_code = "E-KV-FULL"


@dataclass(frozen=True, slots=True)
class KvEntry:
    """The value of a key and its revision, which rises with every change of the bucket."""

    value: bytes
    revision: int


class KeyValue:
    """One key-value bucket.

    Every method raises Unavailable if nothing was done, OutcomeUnknown if a change was sent and its answer was lost
    (read the key to settle it), BucketDeleted if it was deleted, BucketFull if it has no room, Refused without the
    permission. `ttl`: seconds until the server removes an entry; None: never. `optional`: for a command that may only
    read: a missing bucket is empty, and the first write creates it. `max_bytes`: of a bucket that is created, if the
    account requires a limit.
    """

    def __init__(
        self,
        client: FloeClient,
        bucket: str,
        ttl: float | None = None,
        replicas: Replicas = 1,
        optional: bool = False,
        max_bytes: int = STATE_MAX_BYTES,
    ) -> None:
        self._client, self.bucket, self.ttl, self._replicas, self._max_bytes = client, bucket, ttl, replicas, max_bytes
        self._stream, self._prefix, self._is_optional = f"KV_{bucket}", f"$KV.{bucket}.", optional
        # With an API prefix other than `$JS.API`, the bucket's subjects carry that prefix too (ADR-19).
        is_here = client.api_prefix == API_PREFIX
        self._write_prefix = self._prefix if is_here else f"{client.api_prefix}.{self._prefix}"
        # A request must time out well before an entry with this `ttl` expires.
        self._timeout = min(KV_TIMEOUT_S, (ttl or KV_TIMEOUT_S * 5) / 5)

    async def ensure(self) -> Self:
        """Create the bucket if it is missing.

        Raises ConfigError if the bucket has another time to live: leases would be held too long, or state would vanish.
        """
        info = await stream_info(self._client, self._stream)
        max_age = round((self.ttl or 0) * NS_PER_S)
        if info is None:
            replicas = self._replicas if isinstance(self._replicas, int) else await self._replicas()
            try:
                info = await create_stream(self._client, self._config(max_age, replicas), self._max_bytes)
            except ApiError as error:
                if error.err_code == MAX_BYTES_TOO_LARGE:
                    hint = "lower kv_max_bytes, or raise that limit of the account"
                    room = f"expected room for {self._max_bytes} bytes, found: {error.description}"
                    raise BucketFull(f"bucket {self.bucket}: {room}", hint=hint) from error
                if error.err_code != STREAM_NAME_IN_USE:  # another client created it just now
                    raise
                info = await stream_info(self._client, self._stream)
        found = 0 if info is None else info.config.get("max_age", 0)
        if found != max_age:
            expected = f"expected a time to live of {self.ttl or 0:g} s"
            raise ConfigError(
                f"bucket {self.bucket}: {expected}, found {found / NS_PER_S:g} s",
                hint="use one value in all processes that share the bucket, or another bucket",
                code="E-KV-TTL",
            )
        return self

    async def get(self, key: str) -> KvEntry | None:
        """Return the value at the leader; None if there is none, it was deleted, or it expired."""
        last = await self._last_message(key)
        return None if last is None or _is_marker(last) else KvEntry(last.payload, last.sequence)

    async def create(self, key: str, value: bytes) -> int | None:
        """Set `key` unless it has a value; return the revision, or None if it has a value."""
        if (revision := await self._write(key, value, 0)) is not None:
            return revision
        if (last := await self._last_message(key)) is not None and not _is_marker(last):
            return None
        return await self._write(key, value, 0 if last is None else last.sequence)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace the value of that revision; return the new revision, or None if the key has changed."""
        return await self._write(key, value, revision)

    async def put(self, key: str, value: bytes) -> int:
        if (revision := await self._write(key, value, None)) is None:
            raise OutcomeUnknown(f"key {key}: a write without a condition was refused as conditional")
        return revision

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """Delete `key`, but only at `revision` if one is given; return False if the key has changed."""
        return await self._write(key, b"", revision, b"KV-Operation: DEL") is not None

    async def subscribe(
        self, pattern: str, on_change: Callable[[str, bytes | None], None], report_error: ReportError = raise_fatal
    ) -> RawSubscription:
        """Call `on_change` at once with key and value (None: deleted) of each write to a key that matches `pattern`.

        `*` matches any token. This is only a hint: it includes writes that the server refuses, a write may be missed,
        and there is no call for an entry that expires or for a write on the other side of a domain border.
        `report_error`, and the errors raised: as in `subscribe_raw`.
        """

        def sink(subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
            key = subject.decode("utf-8", "backslashreplace").rpartition(self._prefix)[2]
            on_change(key, None if header_value(headers, b"KV-Operation") else payload)

        here = await self._client.subscribe_raw(self._prefix + pattern, sink, report_error)
        if self._write_prefix == self._prefix:
            return here
        try:
            # A server inside the domain removes the prefix; one outside forwards the subject as it was sent.
            return here.merge(await self._client.subscribe_raw(self._write_prefix + pattern, sink, report_error))
        except BaseException:
            await here.unsubscribe()
            raise

    async def keys(self, prefix: str = "") -> list[str]:
        names = [name for name in await self._names(prefix) if name.startswith(prefix)]
        gate = asyncio.Semaphore(PARALLEL_KEY_READS)

        async def is_set(name: str) -> bool:
            async with gate:
                return await self.get(name) is not None

        found = await asyncio.gather(*(is_set(name) for name in names))
        return sorted(name for name, is_present in zip(names, found, strict=True) if is_present)

    async def _names(self, prefix: str) -> list[str]:
        names: dict[str, None] = {}
        wanted = f"{self._prefix}{prefix.rpartition('.')[0]}".removesuffix(".") + ".>"
        while True:
            request = {"subjects_filter": wanted, "offset": len(names)}
            if (answer := await self._request(f"STREAM.INFO.{self._stream}", request)) is None:
                return []
            subjects = (answer.get("state") or {}).get("subjects") or {}
            before = len(names)
            names.update(dict.fromkeys(subject.removeprefix(self._prefix) for subject in subjects))
            if len(subjects) < MAX_SUBJECTS_PER_INFO:
                return [*names]
            if len(names) == before:
                raise Unavailable(f"keys of {self.bucket}: expected more after {before}, found the same again")

    async def _last_message(self, key: str) -> Message | None:
        """Return the last message of `key`, even if it is a deletion marker."""
        request = {"last_by_subj": self._subject(key, self._prefix)}
        answer = await self._request(f"STREAM.MSG.GET.{self._stream}", request, MESSAGE_NOT_FOUND)
        return None if answer is None else stored_message(answer)

    async def _request(self, name: str, request: dict[str, Any], *not_found: int) -> dict[str, Any] | None:
        """Return the answer; None for one of the error codes `not_found`, and for a missing bucket that is optional."""
        try:
            return await query(self._client, name, request, timeout=self._timeout)
        except ApiError as error:
            is_deleted = error.err_code == STREAM_NOT_FOUND
            if error.err_code in not_found or (is_deleted and self._is_optional):
                return None
            raise (self._deleted_error() if is_deleted else error) from None

    async def _write(self, key: str, value: bytes, expected: int | None, *lines: bytes) -> int | None:
        conditions = [b"Nats-Expected-Stream: %b" % self._stream.encode()]
        if expected is not None:
            conditions.append(b"Nats-Expected-Last-Subject-Sequence: %d" % expected)
        answer = await self._publish(
            self._subject(key, self._write_prefix).encode(), value, build_block([*conditions, *lines])
        )
        try:
            return self._parse_revision(key, answer, expected)
        except ApiError as error:
            if "maximum bytes" not in error.description:
                raise
            raise await self._full_error(len(value)) from error

    async def _full_error(self, needed: int) -> BucketFull:
        info = await stream_info(self._client, self._stream)
        size = int(info.config.get("max_bytes", 0)) if info else 0
        return BucketFull(
            f"bucket {self.bucket}: expected room for {needed} bytes more, found it full: max_bytes {size}",
            hint=f"enlarge it:\nnats stream edit KV_{self.bucket} --max-bytes {2 * max(size, needed)}",
        )

    async def _publish(self, subject: bytes, value: bytes, block: bytes) -> bytes:
        """Return the server's answer. Retry, since the connected server may not know a new bucket yet."""
        for pause in (*WRITE_PAUSES_S, None):
            try:
                return (await self._client.request_raw(subject, value, block, timeout=self._timeout))[0]
            except Unavailable as error:
                if error.code != NO_RESPONDERS_CODE or pause is None:
                    raise
            if await stream_info(self._client, self._stream) is None:
                if not self._is_optional:
                    raise self._deleted_error()
                await self.ensure()
            await self._client.clock.sleep(pause)
        raise AssertionError("unreachable")

    def _parse_revision(self, key: str, answer: bytes, expected: int | None) -> int | None:
        """Return the acknowledged revision, or None if the server answers that the condition does not hold."""
        try:
            document = json.loads(answer)
            if error := document.get("error"):
                failure = api_error(error, f"key {key} of {self.bucket}")
                if isinstance(failure, ApiError) and failure.err_code in WRONG_LAST_SEQUENCE_CODES:
                    return None
                raise failure
            revision, stream = document["seq"], document["stream"]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise OutcomeUnknown(f"key {key}: expected an acknowledgement, found {answer[:60]!r}") from None
        if stream != self._stream or not isinstance(revision, int) or revision <= (expected or 0):
            raise OutcomeUnknown(
                f"key {key}: expected an acknowledgement of {self._stream} after {expected or 0}, "
                f"found {stream} at {revision}"
            )
        return revision

    def _subject(self, key: str, prefix: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r:.80}: expected tokens of A-Z a-z 0-9 - _ / = between dots")
        return prefix + key

    def _deleted_error(self) -> BucketDeleted:
        return BucketDeleted(f"bucket {self.bucket} no longer exists")

    def _config(self, max_age: int, replicas: int) -> dict[str, Any]:
        window = 120 * NS_PER_S
        return {
            "name": self._stream,
            "subjects": [f"{self._prefix}>"],
            "max_msgs_per_subject": 1,
            "max_age": max_age,
            "duplicate_window": min(window, max_age or window),
            "discard": "new",
            "storage": "file",
            "num_replicas": replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "metadata": {BUCKET_KEY: "leases" if max_age else "state"},
        }


class Codec(Protocol[T]):
    """A codec for the values of one type, such as `common.documents.JsonCodec`."""

    def encode(self, value: T) -> bytes: ...
    def decode(self, raw: bytes) -> T: ...


class Bucket(Protocol):
    """The methods of `KeyValue` that a document uses."""

    async def get(self, key: str) -> KvEntry | None: ...
    async def create(self, key: str, value: bytes) -> int | None: ...
    async def update(self, key: str, value: bytes, revision: int) -> int | None: ...
    async def put(self, key: str, value: bytes) -> int: ...


class KvDocument(Generic[T]):
    """One key that holds a value of type T. Methods raise the errors of the bucket. Its twin for the object store is
    `common.archive.documents.Document`.

    A write that is answered by nothing may have been done, and may still be under way. The key is read, and its bytes
    are the answer: a write with a condition is done if they are there, sent once more if nothing has changed, and else
    lost to another writer. A `put` is not sent again, as it might undo the write of another: OutcomeUnknown.

    `unreadable_error` makes the error for an invalid value from a description of the problem; `get` and `change` raise
    it.
    """

    def __init__(self, bucket: Bucket, key: str, codec: Codec[T], unreadable_error: Callable[[str], Exception]) -> None:
        self._bucket, self.key, self._codec, self._unreadable_error = bucket, key, codec, unreadable_error

    async def get(self, *, allow_unreadable: bool = False) -> tuple[T | None, int]:
        """Return the value and its revision; None and 0 if there is none. `allow_unreadable`: an unreadable value
        counts as None, with its revision, so that it can be replaced.
        """
        if (entry := await self._bucket.get(self.key)) is None:
            return None, 0
        try:
            return self._codec.decode(entry.value), entry.revision
        except ValueError as error:
            if allow_unreadable:
                return None, entry.revision
            raise self._unreadable_error(f"key {self.key}: {error} (begins {entry.value[:40]!r})") from error

    async def put(self, value: T) -> int:
        return await self._bucket.put(self.key, self._codec.encode(value))

    async def create(self, value: T) -> int | None:
        """Set the value unless there is one; return the revision, or None if there is one."""
        return await self.update(value, 0)

    async def update(self, value: T, revision: int) -> int | None:
        """Replace the value of that revision (0: there is none). Return the new revision, or None if it has changed."""
        body = self._codec.encode(value)
        try:
            return await self._write(body, revision)
        except OutcomeUnknown:
            entry = await self._bucket.get(self.key)
        if entry is None or entry.revision == revision:
            # Not there yet, and perhaps still under way: a second write can only store the same bytes once.
            if (written := await self._write(body, revision)) is not None:
                return written
            entry = await self._bucket.get(self.key)
        return entry.revision if entry is not None and entry.value == body and entry.revision > revision else None

    async def _write(self, body: bytes, revision: int) -> int | None:
        if revision == 0:
            return await self._bucket.create(self.key, body)
        return await self._bucket.update(self.key, body, revision)

    async def change(self, step: Callable[[T | None], T | None], *, allow_unreadable: bool = False) -> T | None:
        """Replace the value by the result of `step` (its argument None: there is no value), even while others change
        it. Return the value that is then stored: the old one if `step` returns None or an equal value. Raises the
        errors of `step`. `allow_unreadable`: as in `get`.
        """
        while True:
            found, revision = await self.get(allow_unreadable=allow_unreadable)
            if (value := step(found)) is None or value == found:
                return found
            if await self.update(value, revision) is not None:
                return value


def _is_marker(message: Message) -> bool:
    return bool(header_value(message.headers, b"KV-Operation") or header_value(message.headers, b"Nats-Marker-Reason"))


def state_key(*parts: str) -> str:
    """Return one key of all `parts`, each a token: other characters become `=XX`, so that different parts never
    collide.

    Raises ValueError for an empty part.
    """
    if not parts or not all(parts):
        raise ValueError(f"key of {parts!r:.80}: expected parts that are not empty")
    return ".".join(_FOREIGN.sub(lambda found: b"=%02X" % ord(found[0]), part.encode()).decode() for part in parts)


async def kv_replicas(client: FloeClient, settings: ServiceSettings, target: str = "") -> int:
    """Return the configured `kv_replicas`; if 0, the highest replica count of the service's streams, with the planned
    count of a target that does not exist. `target`: the target stream of a replay; it counts too.
    """
    if settings.kv_replicas:
        return settings.kv_replicas
    planned = {target: 1} if target else {}  # the count of each stream that does not exist
    if isinstance(settings, EgressSettings):
        planned |= {feed.stream: 1 for feed in settings.feeds}
        if settings.patterns:
            with suppress(Refused):
                planned |= {name: 1 for name in await stream_names(client) if settings.feeds_of(name)}
    else:
        assert isinstance(settings, IngressSettings), "there is no third service"
        planned |= {each.stream: each.create.replicas if each.create else 1 for each in settings.targets}
    return max([await _replicas(client, *each) for each in sorted(planned.items())], default=1)


async def _replicas(client: FloeClient, stream: str, planned: int) -> int:
    info = await stream_info(client, stream)
    return planned if info is None else int(info.config.get("num_replicas", 1))


async def open_state(client: FloeClient, settings: ServiceSettings, *, target: str = "") -> KeyValue:
    """Return the state bucket; create it if it is missing. `target`: as in `kv_replicas`."""
    replicas = partial(kv_replicas, client, settings, target)
    return await KeyValue(client, settings.state_bucket, replicas=replicas, max_bytes=settings.kv_max_bytes).ensure()


def optional_state(client: FloeClient, settings: ServiceSettings) -> KeyValue:
    """The state bucket for a command that may only read. A missing bucket is empty; the first write creates it."""
    replicas, size = partial(kv_replicas, client, settings), settings.kv_max_bytes
    return KeyValue(client, settings.state_bucket, replicas=replicas, optional=True, max_bytes=size)


CLAIM_ATTEMPTS = 5  # a try fails if the claim is settled between `create` and `get`, or if an answer is lost
CLAIM_TIMEOUT_S = 60.0  # seconds for all tries; each request has its own limit


class BucketClaims:
    """Claims on documents that are put once, under `claims.` in the bucket `state`: `PutOnceClaims` of the chain store.

    Create it in the event loop; call it from threads.
    """

    def __init__(self, state: KeyValue) -> None:
        self._state, self._loop = state, asyncio.get_running_loop()

    def claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        return self._wait(self._claim(key, body))

    async def _claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        for _ in range(CLAIM_ATTEMPTS):
            with suppress(OutcomeUnknown):  # the read below settles it
                if (revision := await self._state.create(_claim_key(key), body)) is not None:
                    return body, revision
            if (entry := await self._state.get(_claim_key(key))) is not None:
                return entry.value, entry.revision
        raise Unavailable(f"claim of {key}: lost to other writers {CLAIM_ATTEMPTS} times", code="E-STORE-CONTENDED")

    def settle(self, key: str, revision: int) -> None:
        with suppress(FloeError):
            self._wait(self._state.delete(_claim_key(key), revision))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return doing.result(CLAIM_TIMEOUT_S)
        except TimeoutError:
            doing.cancel()
            raise Unavailable(f"claims in {self._state.bucket}: no answer within {CLAIM_TIMEOUT_S:g} s") from None


def _claim_key(key: str) -> str:
    return f"claims.{sha256(key.encode()).hexdigest()[:32]}"


@asynccontextmanager
async def open_ingress_state(settings: Settings, name: str) -> AsyncIterator[tuple[FloeClient, KeyValue]]:
    """Open a connection for the command `name`, and through it the bucket with the states of the targets.

    Raises the errors of `connect`.
    """
    client = await connect(settings.nats_for("ingress"), name=name)
    try:
        yield client, optional_state(client, settings.ingress)
    finally:
        await client.aclose()
