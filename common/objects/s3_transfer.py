"""What listings and HEADs say, doubted.

A server, a proxy or a wrong address can answer 200 with HTML, with nothing, or for another bucket, and boto3
reads all of these as an empty listing: "nothing is there yet". So a page must say what it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_plus

from common.errors import Unavailable
from common.objects.checksums import base64_to_sha256
from common.objects.keys import in_key_order
from common.objects.port import HiddenObject, ObjectInfo


class Listing:
    """The objects of one listing, gathered page by page."""

    def __init__(self, bucket: str, prefix: str, start_after: str, limit: int | None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._start_after = in_key_order(start_after)
        self._limit = limit
        self._found: dict[str, ObjectInfo] = {}
        self._passed: set[str] = set()  # keys not asked for, of a server that begins in the wrong place

    def is_full(self) -> bool:
        """Whether `limit` objects were found."""
        return self._limit is not None and len(self._found) >= self._limit

    def add(self, page: Mapping[str, Any]) -> str | None:
        """Take a page; the token of the next one, None after the last. Raises Unavailable.

        Each key comes once, asked for or not: a server that repeats itself would be asked for ever.
        """
        contents = page.get("Contents", [])
        self._expect("Name", page.get("Name"), self._bucket)
        self._expect_prefix(page.get("Prefix"))
        self._expect("KeyCount", page.get("KeyCount"), len(contents))
        for entry in contents:
            self._add_object(entry)
        return self._next_token(page, len(contents))

    def objects(self) -> builtins.list[ObjectInfo]:
        """What was found, in key order, at most `limit`."""
        # SeaweedFS lists `a/1` before `a-b`, folder by folder, so the order of the pages is not the keys'.
        return [self._found[key] for key in sorted(self._found, key=in_key_order)][: self._limit]

    def _add_object(self, entry: Mapping[str, Any]) -> None:
        info = _object_info(entry)
        is_known = info is not None and (info.key in self._found or info.key in self._passed)
        if info is None or is_known or not info.key.startswith(self._prefix):
            raise self._invalid("an entry", "a new key under the prefix, with size and time", entry)
        if in_key_order(info.key) > self._start_after:
            self._found[info.key] = info
        else:
            self._passed.add(info.key)

    def _next_token(self, page: Mapping[str, Any], count: int) -> str | None:
        if page.get("IsTruncated") is False:
            return None
        token = page.get("NextContinuationToken")
        if page.get("IsTruncated") is not True or not token or not count:
            raise self._invalid("the end", "IsTruncated false, or entries and a token", token)
        return str(token)

    def _expect_prefix(self, found: object) -> None:
        # boto3 asks for encoded keys and decodes the echoed prefix too, which SeaweedFS does not encode.
        if found != unquote_plus(self._prefix):
            self._expect("Prefix", found, self._prefix)

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise self._invalid(what, repr(expected), found)

    def _invalid(self, what: str, expected: str, found: object) -> Unavailable:
        return Unavailable(
            f"list s3://{self._bucket}/{self._prefix}: {what}: expected {expected}, found {found!r:.200}",
            hint="something else than the object store answered; check store.endpoint_url and proxies",
            code="E-LIST-INVALID",
        )


def head_info(key: str, answer: Mapping[str, Any]) -> ObjectInfo | None:
    """What the answer to a HEAD says; None where it lacks what every store says."""
    modified, size = answer.get("LastModified"), answer.get("ContentLength")
    if modified is None or size is None:
        return None
    is_composite = answer.get("ChecksumType") == "COMPOSITE"  # of the parts' checksums, not of the bytes
    sha256 = None if is_composite else base64_to_sha256(str(answer.get("ChecksumSHA256", "")))
    etag = str(answer.get("ETag", "")).strip('"')
    metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
    return ObjectInfo(key, int(size), modified.timestamp(), etag, sha256, metadata)


def hidden_objects(answer: Mapping[str, Any]) -> list[HiddenObject]:
    """The objects that a delete marker hides, with the newest version behind it, in key order."""
    newest: dict[str, Mapping[str, Any]] = {}
    for entry in answer.get("Versions", []):
        known = newest.setdefault(entry["Key"], entry)
        if entry["LastModified"] > known["LastModified"]:
            newest[entry["Key"]] = entry
    found = {
        marker["Key"]: HiddenObject(
            marker["Key"], str(kept["VersionId"]), kept["LastModified"].timestamp(), str(marker["VersionId"])
        )
        for marker in answer.get("DeleteMarkers", [])
        if marker.get("IsLatest") and (kept := newest.get(marker["Key"]))
    }
    return [found[key] for key in sorted(found, key=in_key_order)]


def _object_info(entry: Mapping[str, Any]) -> ObjectInfo | None:
    try:
        etag = str(entry.get("ETag", "")).strip('"')
        return ObjectInfo(str(entry["Key"]), int(entry["Size"]), entry["LastModified"].timestamp(), etag)
    except (KeyError, AttributeError, ValueError):
        return None
