"""The object store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator

from common.settings.base import Section, needed, option
from common.settings.types import Flag, Kind, Label, Path, Required, Secret, Text, matching
from common.settings.urls import check_host_url, check_store_url

# What is encoded nowhere: no engine needs more, and names beginning with _ or . are skipped by most.
_PREFIX = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._=-]*(/[A-Za-z0-9-][A-Za-z0-9._=-]*)*")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_STORAGE_CLASS = re.compile(r"[A-Z0-9_-]{1,64}")


def _check_endpoint(text: str) -> str:
    return (
        check_host_url(text, ("https", "http"), "access_key_id and secret_access_key_file") if text else text
    )


class StoreTlsSettings(Section):
    """TLS to the object store."""

    ca: Path = option("", "CA certificates; empty: the system's")
    insecure: Flag = option(
        False, "do not check the server's certificate; for tests only, warned of at each start"
    )


class EncryptionSettings(Section):
    """Encryption at rest, by the store."""

    mode: Literal["none", "sse-s3", "sse-kms"] = option("none", "what the store encrypts with")
    kms_key_id: Label = option("", "the key; with `sse-kms`, empty: the bucket's default")


class StoreSettings(Section):
    """Where segments are kept."""

    url: Annotated[Text, AfterValidator(check_store_url), Kind("URL")] = needed(
        "`s3://bucket` or `file:///folder`"
    )
    prefix: Annotated[
        Text, matching(_PREFIX, "parts of A-Z a-z 0-9 . _ = - joined by /, none beginning with . or _")
    ] = option("data", "what every key begins with; empty: nothing")
    endpoint_url: Annotated[Text, AfterValidator(_check_endpoint), Kind("URL")] = option(
        "", "a server that is not Amazon's: MinIO, SeaweedFS, Ceph"
    )
    region: Annotated[Text, matching(_REGION, "a region such as us-east-1"), Required] = option(
        "us-east-1", "the region that requests are signed for"
    )
    addressing_style: Literal["auto", "path", "virtual"] = option(
        "auto", "where the bucket stands in requests; auto: path with an `endpoint_url`"
    )
    checksum: Literal["sha256", "crc32", "none"] = option(
        "sha256", "what the server checks uploads with; none: every object is read back whole"
    )
    access_key_id: Label = option("", "empty: the AWS credential chain")
    secret_access_key: Secret = option("", "the secret of `access_key_id`")
    tls: StoreTlsSettings = option({}, "TLS to the store")
    storage_class: Annotated[Text, matching(_STORAGE_CLASS, "a storage class such as STANDARD_IA")] = option(
        "", "empty: the bucket's default"
    )
    encryption: EncryptionSettings = option({}, "encryption at rest")
    subject_statistics: Flag = option(
        True,
        "false: no least and greatest subject in the metadata of segments, where they are easy to read",
    )

    def combinations(self) -> Iterator[tuple[str, str]]:
        secret = self.secret_access_key.get_secret_value()
        if self.access_key_id and not secret:
            yield (
                "access_key_id",
                "expected secret_access_key or secret_access_key_file beside it, found none",
            )
        if secret and not self.access_key_id:
            yield "secret_access_key", "expected access_key_id beside it, found none"
        if self.encryption.kms_key_id and self.encryption.mode != "sse-kms":
            yield "encryption.kms_key_id", f"expected mode sse-kms beside it, found {self.encryption.mode}"
        if self.endpoint_url and self.url.startswith("file:"):
            yield "endpoint_url", "expected none beside a file:// store, found one"
        if self.endpoint_url.startswith("http:") and (self.tls.ca or self.tls.insecure):
            yield "tls", "expected none for an http:// endpoint, found some"
