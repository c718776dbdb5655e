"""Transfers to and from S3: uploads, bodies and listings, with a check of each answer.

A server, a proxy or a wrong address can answer 200 with HTML, with nothing, or for another bucket, and boto3 reads all
of these as an empty listing: "nothing is there yet". So each page must name its bucket and prefix.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

from urllib3.exceptions import HTTPError

from common.errors import OutcomeUnknown, Unavailable
from common.objects.port import (
    Body,
    ChecksumMismatch,
    LifecycleRule,
    ObjectInfo,
    body_size,
    iter_chunks,
    open_body,
    sha256_of,
)
from common.settings.root import COLD_CLASSES

MAX_ANSWER_BYTES = 16 * 1024 * 1024  # of a page of a listing, an error or a receipt: all but the body of an object
MAX_EMPTY_PAGES = 1000  # in succession in one listing: a store skips deleted objects


class BoundedSession:
    """boto3's HTTP session, limited to MAX_ANSWER_BYTES of an answer that it keeps whole in memory.

    `too_long`, `lost`: boto3's errors for an answer that it cannot read, and for one that ends too early.
    """

    def __init__(self, session: Any, too_long: Callable[[str], Exception], lost: Callable[..., Exception]) -> None:
        self._session, self._too_long, self._lost = session, too_long, lost
        self.close = session.close

    def send(self, request: Any) -> Any:
        """Send the request. Raises `too_long`, `lost`, and the errors of boto3's own session."""
        is_whole, request.stream_output = not request.stream_output, True
        response = self._session.send(request)
        if is_whole or response.status_code >= 300:
            response._content = b"".join(self._chunks(response.raw))  # boto3's own field for it
        return response

    def _chunks(self, body: Any) -> Iterator[bytes]:
        found = 0
        try:
            for chunk in body.stream():
                if (found := found + len(chunk)) > MAX_ANSWER_BYTES:
                    body.close()
                    raise self._too_long(f"expected at most {MAX_ANSWER_BYTES} bytes, found more")
                yield chunk
        except HTTPError as error:
            raise self._lost(error=error) from error


class Listing:
    """The objects of one listing, gathered page by page."""

    def __init__(self, bucket: str, prefix: str, start_after: str, limit: int | None) -> None:
        self._bucket, self._prefix, self._start_after, self._limit = bucket, prefix, start_after, limit
        self._found: dict[str, ObjectInfo] = {}
        self._skipped_keys: set[str] = set()  # unwanted keys, from a server that begins in the wrong place
        self._token, self._empty_pages = "", 0  # token of the previous page; empty pages in succession

    def is_full(self) -> bool:
        return self._limit is not None and len(self._found) >= self._limit

    def add(self, page: Mapping[str, Any]) -> str | None:
        """Add a page; return the token of the next one, None after the last. Raises Unavailable.

        No key may come twice, wanted or not: with a server that repeats itself the listing would never end.
        """
        contents = page.get("Contents", [])
        self._expect("Name", page.get("Name"), self._bucket)
        # boto3 requests encoded keys and decodes the echoed prefix too, but SeaweedFS does not encode the prefix.
        if (prefix := page.get("Prefix")) != unquote_plus(self._prefix):
            self._expect("Prefix", prefix, self._prefix)
        self._expect("KeyCount", page.get("KeyCount"), len(contents))
        for entry in contents:
            self._add_object(entry)
        return self._next_token(page, len(contents))

    def sorted_objects(self) -> builtins.list[ObjectInfo]:
        # SeaweedFS lists folder by folder, `a/1` before `a-b`, so pages are not in key order.
        return [self._found[key] for key in sorted(self._found)][: self._limit]

    def take_objects(self) -> builtins.list[ObjectInfo]:
        """Return the objects since the last call, in order."""
        taken = self.sorted_objects()
        self._found.clear()
        return taken

    def _add_object(self, entry: Mapping[str, Any]) -> None:
        info = None
        with suppress(KeyError, AttributeError, ValueError):
            etag = str(entry.get("ETag", "")).strip('"')
            # Whole seconds, as in the answer to a HEAD: MinIO lists milliseconds.
            modified = float(int(entry["LastModified"].timestamp()))
            info = ObjectInfo(str(entry["Key"]), int(entry["Size"]), modified, etag)
        is_known = info is not None and (info.key in self._found or info.key in self._skipped_keys)
        if info is None or is_known or not info.key.startswith(self._prefix):
            raise self._invalid("an entry", "a new key under the prefix, with size and time", entry)
        if info.key > self._start_after:
            self._found[info.key] = info
        else:
            self._skipped_keys.add(info.key)

    def _next_token(self, page: Mapping[str, Any], count: int) -> str | None:
        if page.get("IsTruncated") is False:
            return None
        token = str(page.get("NextContinuationToken") or "")
        self._empty_pages = 0 if count else self._empty_pages + 1
        if page.get("IsTruncated") is not True or token in ("", self._token) or self._empty_pages > MAX_EMPTY_PAGES:
            expected = f"IsTruncated false, or another token and entries within {MAX_EMPTY_PAGES} pages"
            raise self._invalid("the end", expected, token)
        self._token = token
        return token

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise self._invalid(what, repr(expected), found)

    def _invalid(self, what: str, expected: str, found: object) -> Unavailable:
        return Unavailable(
            f"list s3://{self._bucket}/{self._prefix}: {what}: expected {expected}, found {found!r:.200}",
            hint="something other than the object store answered; check store.endpoint_url and proxies",
            code="E-LIST-INVALID",
        )


def parse_head(key: str, answer: Mapping[str, Any]) -> ObjectInfo | None:
    """Return the properties in the answer to a HEAD; None without a size or a time, which every store gives."""
    modified, size = answer.get("LastModified"), answer.get("ContentLength")
    if modified is None or size is None:
        return None
    is_composite = answer.get("ChecksumType") == "COMPOSITE"  # a checksum of the parts' checksums, not of the bytes
    sha256 = None if is_composite else _sha256_in(str(answer.get("ChecksumSHA256", "")))
    etag = str(answer.get("ETag", "")).strip('"')
    metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
    return ObjectInfo(key, int(size), modified.timestamp(), etag, sha256, metadata)


def _sha256_in(text: str) -> str | None:
    """Return 64 hex digits; None if `text` is not one SHA-256, such as the composite of a multipart upload."""
    try:
        digest = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return digest.hex() if len(digest) == 32 else None


def enabled_rules(answer: Mapping[str, Any]) -> list[LifecycleRule]:
    return [_lifecycle_rule(rule) for rule in answer.get("Rules", []) if rule.get("Status") == "Enabled"]


def _lifecycle_rule(rule: Mapping[str, Any]) -> LifecycleRule:
    chosen = rule.get("Filter") or {}
    both = chosen.get("And") or chosen
    cold = [str(each.get("StorageClass")) for each in rule.get("Transitions", [])]
    return LifecycleRule(
        name=str(rule.get("ID", "")),
        prefix=str(both.get("Prefix") or rule.get("Prefix") or ""),
        is_partial=any(name != "Prefix" for name in both),
        deletes=bool({"Days", "Date"} & (rule.get("Expiration") or {}).keys()),
        archive_class=next((each for each in cold if each in COLD_CLASSES), ""),
        deletes_versions="NoncurrentVersionExpiration" in rule,
        aborts_uploads="AbortIncompleteMultipartUpload" in rule,
    )


MAX_PARTS = 10_000


@dataclass(slots=True)
class Upload:
    """One body to put under one key. Raises the errors of boto3, ChecksumMismatch and OutcomeUnknown."""

    client: Any  # the stubs accept no dictionary of fields
    target: Mapping[str, str]
    body: Body
    sha256: str | None
    checksum: str
    common: Mapping[str, Any]
    _id: str | None = None

    @property
    def place(self) -> str:
        return f"s3://{self.target['Bucket']}/{self.target['Key']}"

    def put_whole(self, condition: Mapping[str, Any]) -> None:
        fields = {**self.common, **self._checksum_of(self.body, self.sha256), **condition}
        with nullcontext(self.body) if isinstance(self.body, bytes) else self.body.open("rb") as body:
            self._require("ETag", self.client.put_object(**self.target, Body=body, **fields))

    def send_parts(self, part_bytes: int) -> list[dict[str, Any]]:
        """Begin a multipart upload and send all parts; nothing of it is visible before `commit`."""
        algorithm = {} if self.checksum == "none" else {"ChecksumAlgorithm": "SHA256"}
        begun = self.client.create_multipart_upload(**self.target, **self.common, **algorithm)
        self._id = self._require("UploadId", begun)
        size = max(part_bytes, -(-body_size(self.body) // MAX_PARTS))
        parts, digest = [], hashlib.sha256()
        with open_body(self.body) as file:
            for number, part in enumerate(iter_chunks(file, size), start=1):
                digest.update(part)
                parts.append(self._send_part(number, part))
        # The server checks each part only, so the checksum of the whole body is checked here, before the commit.
        if self.checksum == "sha256" and self.sha256 not in (None, digest.hexdigest()):
            raise ChecksumMismatch(f"put {self.place}: expected {self.sha256}, found {digest.hexdigest()}")
        return parts

    def commit(self, parts: list[dict[str, Any]], condition: Mapping[str, Any]) -> None:
        fields: dict[str, Any] = {"UploadId": self._id, "MultipartUpload": {"Parts": parts}}
        self._require("ETag", self.client.complete_multipart_upload(**self.target, **fields, **condition))
        self._id = None

    def abort(self) -> None:
        if self._id:
            upload_id, self._id = self._id, None
            self.client.abort_multipart_upload(**self.target, UploadId=upload_id)

    def _require(self, name: str, answer: Mapping[str, Any]) -> Any:
        if name not in answer:
            raise OutcomeUnknown(f"put {self.place}: not an S3 answer: no {name}")
        return answer[name]

    def _send_part(self, number: int, part: bytes) -> dict[str, Any]:
        fields = self._checksum_of(part, None)
        answer = self.client.upload_part(**self.target, UploadId=self._id, PartNumber=number, Body=part, **fields)
        return {"PartNumber": number, "ETag": self._require("ETag", answer), **fields}

    def _checksum_of(self, body: Body, sha256: str | None) -> dict[str, Any]:
        if self.checksum == "sha256":
            digest = bytes.fromhex(sha256 or sha256_of(body))
            return {"ChecksumSHA256": base64.b64encode(digest).decode()}
        return {}


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class TruncatedBodyError(Unavailable):
    """The body ended before the announced length, or is not the requested range."""

    default_code = "E-S3-CUT"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes from offset `first`, `length` of them (at least 1) or to the end."""

    first: int
    length: int | None

    def header(self) -> str:
        return f"bytes={self.first}-{'' if self.length is None else self.first + self.length - 1}"

    def size_in(self, content_range: str) -> int:
        """Return the number of bytes in an answer with this `Content-Range`. Raises TruncatedBodyError for another."""
        if not (match := _CONTENT_RANGE.fullmatch(content_range)):
            raise TruncatedBodyError(f"expected {self.header()}, found Content-Range {content_range!r:.80}")
        first, last, total = (int(number) for number in match.groups())
        end = total if self.length is None else min(total, self.first + self.length)
        if (first, last + 1) != (self.first, end):
            raise TruncatedBodyError(f"expected {self.header()}, found {content_range}")
        return end - first


class AnswerBody:
    """A body and its required length; at most one byte more than that is read."""

    def __init__(self, stream: io.BufferedIOBase, expected: int) -> None:
        self._stream, self._expected = stream, expected

    @classmethod
    def open(cls, answer: Mapping[str, Any], wanted: ByteRange | None, size: Callable[[], int | None]) -> AnswerBody:
        """Return the body of `answer`; `size` finds the object's size if the answer announces no length."""
        stream = answer["Body"]
        try:
            if wanted:
                return cls(stream, wanted.size_in(str(answer.get("ContentRange", ""))))
            announced = answer.get("ContentLength")
            if (expected := size() if announced is None else int(announced)) is None:
                raise TruncatedBodyError("expected a length, found none, and no object to ask for it")
            return cls(stream, expected)
        except BaseException:
            stream.close()
            raise

    def close(self) -> None:
        self._stream.close()

    def chunks(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the body in pieces of at most `max_bytes`; by default as few as the server sends.

        Raises TruncatedBodyError after the last one, unless the body is as long as announced.
        """
        size, found = max_bytes or self._expected + 1, 0
        while chunk := self._stream.read(min(size, self._expected + 1 - found)):
            found += len(chunk)
            yield chunk
        if found != self._expected:
            more = " or more" if found > self._expected else ""
            raise TruncatedBodyError(f"expected {self._expected} bytes, found {found}{more}")
