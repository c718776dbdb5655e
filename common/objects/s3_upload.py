"""One put to S3: in one request, or in parts where the body is large."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from common.errors import OutcomeUnknown
from common.objects.checksums import (
    ChecksumMismatch,
    chunks,
    crc32_base64,
    hex_to_base64,
    opened,
    sha256_of,
    size_of,
)
from common.objects.port import Body

MAX_PARTS = 10_000


class Upload:
    """What is to be put under one key. Raises what boto3 raises, ChecksumMismatch and OutcomeUnknown."""

    def __init__(
        self,
        client: Any,  # the stubs know no dictionaries of fields
        target: Mapping[str, str],
        body: Body,
        *,
        sha256: str | None,
        checksum: str,
        common: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._target = dict(target)
        self.place = f"s3://{target['Bucket']}/{target['Key']}"
        self.body = body
        self._sha256 = sha256
        self._checksum = checksum
        self._common = common
        self._upload_id: str | None = None

    def whole(self, condition: Mapping[str, Any]) -> None:
        """Put in one request, which the server takes as a whole or not at all."""
        fields = {**self._common, **self._checksum_of(self.body, self._sha256), **condition}
        if isinstance(self.body, bytes):
            self._expect_etag(self._client.put_object(**self._target, Body=self.body, **fields))
        else:
            with self.body.open("rb") as file:
                self._expect_etag(self._client.put_object(**self._target, Body=file, **fields))

    def send_parts(self, part_bytes: int) -> list[dict[str, Any]]:
        """Begin an upload and send all parts; nothing of it can be seen before `commit`."""
        algorithm = {} if self._checksum == "none" else {"ChecksumAlgorithm": self._checksum.upper()}
        begun = self._client.create_multipart_upload(**self._target, **self._common, **algorithm)
        self._upload_id = begun["UploadId"]
        size = max(part_bytes, -(-size_of(self.body) // MAX_PARTS))
        parts, digest = [], hashlib.sha256()
        with opened(self.body) as file:
            for number, part in enumerate(chunks(file, size), start=1):
                digest.update(part)
                parts.append(self._send_part(number, part))
        self._check_whole(digest.hexdigest())
        return parts

    def commit(self, parts: list[dict[str, Any]], condition: Mapping[str, Any]) -> None:
        """Make the object of the parts."""
        fields: dict[str, Any] = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        answer = self._client.complete_multipart_upload(**self._target, **fields, **condition)
        self._expect_etag(answer)
        self._upload_id = None

    def abort(self) -> None:
        """Throw away what was sent and not committed."""
        if self._upload_id:
            upload_id, self._upload_id = self._upload_id, None
            self._client.abort_multipart_upload(**self._target, UploadId=upload_id)

    def _expect_etag(self, answer: Mapping[str, Any]) -> None:
        if "ETag" not in answer:
            raise OutcomeUnknown(f"put {self.place}: not an S3 answer: no ETag")

    def _check_whole(self, found: str) -> None:
        # The server checks each part only, so the sum over all of them is checked here, before the commit.
        if self._checksum == "sha256" and self._sha256 not in (None, found):
            raise ChecksumMismatch(f"put {self.place}: expected {self._sha256}, found {found}")

    def _send_part(self, number: int, part: bytes) -> dict[str, Any]:
        fields = self._checksum_of(part, None)
        answer = self._client.upload_part(
            **self._target, UploadId=self._upload_id, PartNumber=number, Body=part, **fields
        )
        return {"PartNumber": number, "ETag": answer["ETag"], **fields}

    def _checksum_of(self, body: Body, sha256: str | None) -> dict[str, Any]:
        if self._checksum == "sha256":
            return {"ChecksumSHA256": hex_to_base64(sha256 or sha256_of(body))}
        if self._checksum == "crc32":
            return {"ChecksumCRC32": crc32_base64(body)}
        return {}
