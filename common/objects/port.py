"""The object store port: eight verbs, synchronous, safe to call from several threads.

Services call it in threads (`common.service.process`); Spark tasks call it directly. One contract suite
(`tests/contract/test_objects.py`) runs over every implementation.
"""

import builtins
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from common.errors import ConfigError, OutcomeUnknown, Refused, Unavailable
from common.metrics import counter, histogram, show_zeros

Body = bytes | Path


class ObjectInfo(NamedTuple):  # a tuple, since a listing returns a million
    """The properties of an object, from a listing or a HEAD.

    `modified`: seconds since 1970 UTC by the store's clock. `etag`: opaque, only for `put_if_match`, never for
    integrity. `sha256`: 64 hex digits that the *server* computed and keeps; None if it does not (and always None in a
    listing). `metadata`: lower-case names; empty in a listing.
    """

    key: str
    size: int
    modified: float
    etag: str
    sha256: str | None = None
    metadata: Mapping[str, str] = {}


class ObjectStore(Protocol):
    """A flat store of immutable-by-convention objects.

    Every verb raises `Unavailable` if the store cannot be reached or asks for a later retry (after its own bounded
    retries), `Refused` for credentials and permissions, `ConfigError` if the bucket does not exist. Only the four
    writing verbs raise `OutcomeUnknown`: the answer was lost. The two with a condition raise `ConditionalPutRefused` if
    the store supports none.
    """

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        """Return all objects with a key that begins with `prefix` and sorts after `start_after`, in the order of UTF-8
        bytes, which is the order of str.

        At most `limit`, if given. A failed or invalid page discards the whole listing (Unavailable, code
        E-LIST-INVALID): a part is never returned as the whole.
        """

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        """Return the bytes from offset `first`, `length` of them or to the end; None if there is no such object.

        If fewer bytes arrive than the server announced, it retries, then raises Unavailable; it never returns them.
        """

    def download(self, key: str, path: Path) -> bool:
        """Write the whole object to the new file `path` in bounded memory; return False if there is no object."""

    def put(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the object, replacing any; the server checks `sha256` (64 hex digits) if it can."""

    def put_if_absent(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> bool:
        """Write the object unless there is one; return False if there is. Do not rely on it alone: some servers ignore
        the condition.
        """

    def put_if_match(self, key: str, body: Body, etag: str) -> bool:
        """Replace the object if its ETag is still `etag`; return False if it is not, or if the object is gone."""

    def delete(self, key: str) -> None:
        """Remove the object; no error if it is not there."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return the stored properties of the object, with the server's own checksum; None if there is no object."""


def read_store_clock(objects: ObjectStore, key: str) -> float:
    """Return seconds since 1970 UTC by the store's clock, read from the object `key`, which is written for this."""
    objects.put(key, b"")
    if (info := objects.head(key)) is None:
        raise Unavailable(f"object {key}: not found after it was written", code="E-READ-BACK")
    return info.modified


# The metrics of every store count calls, not tries; "there is no such object" is an answer too.

STORE_OPS = ("list", "get", "put", "delete", "head")
STORE_RESULTS = ("ok", "refused", "unavailable", "unknown", "failed")

requests = counter(
    "store_requests",
    "Calls of the object store, including its own retries, by result.",
    ("op", "result"),
    op=STORE_OPS,
    result=STORE_RESULTS,
)
request_seconds = histogram(
    "store_request_seconds",
    "Time of one call of the object store, including retries and transfer.",
    ("op",),
    buckets=(0.02, 0.1, 0.5, 2.5, 10.0, 60.0),
    op=STORE_OPS,
)
show_zeros("store_")


#: The calls of all stores in this process that have not ended.
calls_in_flight: set[object] = set()


@contextmanager
def measure_call(op: str) -> Iterator[None]:
    """Count and time one call; as a decorator, each call of a verb."""
    result, call = "failed", object()
    calls_in_flight.add(call)
    try:
        with request_seconds.labels(op).time():
            yield
        result = "ok"
    except Refused:
        result = "refused"
        raise
    except OutcomeUnknown:
        result = "unknown"
        raise
    except Unavailable:
        result = "unavailable"
        raise
    finally:
        calls_in_flight.discard(call)
        requests.labels(op, result).inc()


# Optional capabilities of a store; callers work without them.


@runtime_checkable
class PagedStore(Protocol):
    """A store that lists page by page."""

    def pages(self, prefix: str) -> Iterator[builtins.list[ObjectInfo]]:
        """Yield the result of `list(prefix)` page by page: in no order, and never all of it in memory."""


@runtime_checkable
class ClassingStore(Protocol):
    """A store with storage classes."""

    def with_storage_class(self, name: str) -> ObjectStore:
        """Return the same store, but objects that are put have this class."""


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """One enabled rule of a bucket, for keys that begin with `prefix`; `is_partial`: for some of them, by tag or size.

    `deletes`: current objects, after a time. `archive_class`: the storage class that they move to and cannot be read
    from at once; empty: none. `deletes_versions`: former versions, after a time. `aborts_uploads`: those that never
    ended.
    """

    name: str
    prefix: str
    is_partial: bool = False
    deletes: bool = False
    archive_class: str = ""
    deletes_versions: bool = False
    aborts_uploads: bool = False


@runtime_checkable
class BucketStore(Protocol):
    """A store with buckets, which may change objects by rules of their own. Raises as the verbs; ConfigError if it
    reports no rules.
    """

    def create_bucket(self) -> None:
        """Create the bucket, which does not exist."""

    def versioning(self) -> str:
        """Return `Enabled`, `Suspended`, or empty: never switched on."""

    def lifecycle(self) -> builtins.list[LifecycleRule]:
        """Return the enabled rules, an empty list if there are none."""


MAX_OBJECT_KEY_BYTES = 1024

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str) -> None:
    """Raise ConfigError unless `key` is 1 to 1024 bytes of UTF-8, no control character, no part empty, `.` or `..`."""
    _check(key, key.split("/"))


def check_prefix(prefix: str) -> None:
    """Raise ConfigError unless keys can begin with `prefix`, which may be empty or end inside a part."""
    _check(prefix, prefix.split("/")[:-1])


def _check(key: str, parts: Sequence[str]) -> None:
    if not {"", ".", ".."}.isdisjoint(parts):
        raise _key_error(key, "parts that are neither empty, '.' nor '..'")
    try:
        size = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError:
        raise _key_error(key, "UTF-8") from None
    if size > MAX_OBJECT_KEY_BYTES:
        raise _key_error(key, f"at most {MAX_OBJECT_KEY_BYTES} bytes")
    if not key.isprintable() and _CONTROL.search(key):
        raise _key_error(key, "no control characters")


def _key_error(key: str, expected: str) -> ConfigError:
    return ConfigError(f"object key {key!r:.200}: expected {expected}", code="E-KEY")


COPY_CHUNK_BYTES = 1024 * 1024


class ConditionalPutRefused(ConfigError):
    """The store refuses a put with a condition; nothing was done. Writers of a plain put must agree by other means."""

    default_code = "E-STORE-CONDITIONS"


def put_new(objects: ObjectStore, key: str, body: Body, *, sha256: str, metadata: Mapping[str, str]) -> None:
    """Put an object whose key holds the digest of its content, unless there is one: another writer puts the same bytes.
    So it is put over any in a store that refuses conditions. Raises the other errors of both verbs.
    """
    try:
        objects.put_if_absent(key, body, sha256=sha256, metadata=metadata)
    except ConditionalPutRefused:
        objects.put(key, body, sha256=sha256, metadata=metadata)


class ChecksumMismatch(Unavailable):
    """The store received bytes that do not match the checksum, and kept none of them."""

    default_code = "E-STORE-DIGEST"


def body_size(body: Body) -> int:
    return body.stat().st_size if isinstance(body, Path) else len(body)


def open_body(body: Body) -> io.BufferedIOBase:
    """Open the body for one read; the caller closes it."""
    return body.open("rb") if isinstance(body, Path) else io.BytesIO(body)


def iter_chunks(file: io.BufferedIOBase, size: int = COPY_CHUNK_BYTES) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def sha256_of(body: Body) -> str:
    """Return the SHA-256 of the body, as 64 hex digits."""
    with open_body(body) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
