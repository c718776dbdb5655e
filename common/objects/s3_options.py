"""How to speak to an S3 store, and what that adds to each request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to speak to a store.

    `checksum`: what the server is asked to check on a put. `ca`: None for the system's. `attempts`: per
    request, the first included. `connect_timeout`, `read_timeout`: seconds. `connections`: kept open, as many
    as threads use the store. Bodies above `multipart_bytes` go up in parts of `part_bytes`.
    """

    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    checksum: Literal["sha256", "crc32", "none"] = "sha256"
    storage_class: str = ""
    encryption: Literal["none", "sse-s3", "sse-kms"] = "none"
    kms_key_id: str = ""
    ca: Path | None = None
    insecure: bool = False
    attempts: int = 5
    connect_timeout: float = 5.0
    read_timeout: float = 60.0
    connections: int = 16
    multipart_bytes: int = 64 * 1024 * 1024
    part_bytes: int = 16 * 1024 * 1024

    def storing(self) -> dict[str, Any]:
        """What every new object is put with."""
        fields = {"StorageClass": self.storage_class} if self.storage_class else {}
        if self.encryption == "sse-s3":
            fields["ServerSideEncryption"] = "AES256"
        if self.encryption == "sse-kms":
            fields["ServerSideEncryption"] = "aws:kms"
            if self.kms_key_id:
                fields["SSEKMSKeyId"] = self.kms_key_id
        return fields

    def checksum_mode(self) -> dict[str, Any]:
        """What asks a HEAD for the checksum that the server keeps."""
        return {"ChecksumMode": "ENABLED"} if self.checksum == "sha256" else {}

    def verification(self) -> bool | str | None:
        """Which certificates boto3 trusts: none checked, a file of authorities, or its own default."""
        if self.insecure:
            return False
        return str(self.ca) if self.ca else None

    def addressing(self, endpoint_url: str | None) -> Literal["auto", "path", "virtual"]:
        """`path` where `auto` meets a server of one's own: it seldom has a name for each bucket."""
        return "path" if endpoint_url and self.addressing_style == "auto" else self.addressing_style
