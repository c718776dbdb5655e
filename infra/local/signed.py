"""Signed HTTP requests to a local S3 server: enough to make buckets and to see that it serves."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
from dataclasses import dataclass
from urllib.parse import quote

REGION = "us-east-1"
_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class SignedClient:
    """Speaks to the S3 server on `port` of 127.0.0.1."""

    port: int
    access_key: str
    secret_key: str

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError and http.client.HTTPException."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        return request(self.port, method, path, body, self._headers(method, path, stamp))

    def _headers(self, method: str, path: str, stamp: str) -> dict[str, str]:
        """AWS Signature Version 4, the body left unsigned."""
        scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
        signed = {
            "host": f"127.0.0.1:{self.port}",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-date": stamp,
        }
        names = ";".join(signed)
        lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
        canonical = f"{method}\n{quote(path)}\n\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = _hmac(key, part)
        signature = _hmac(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}").hex()
        credential = f"Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        return {**signed, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}


def request(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer of a server on loopback. Raises OSError and http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
