"""An S3 server that notifies as MinIO does: a proxy in front of SeaweedFS, and what it publishes on NATS."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import quote_plus, urlsplit

from tests.http_proxy import Answer, Exchange, FaultProxy


def notification(bucket: str, key: str, size: int = 1) -> dict[str, Any]:
    """MinIO's document for an object that was put; the key stands in it as in a form."""
    name = "s3:ObjectCreated:Put"
    return {
        "EventName": name,
        "Key": f"{bucket}/{key}",
        "Records": [
            {
                "eventVersion": "2.0",
                "eventSource": "minio:s3",
                "awsRegion": "",
                "eventName": name,
                "s3": {
                    "s3SchemaVersion": "1.0",
                    "configurationId": "Config",
                    "bucket": {"name": bucket, "arn": f"arn:aws:s3:::{bucket}"},
                    "object": {"key": quote_plus(key), "size": size, "sequencer": "15CFEDF8D5304D1A"},
                },
            }
        ],
    }


class Notifying:
    """`url` is an S3 server: the one at `upstream`, with a notification on `subject` after each put."""

    def __init__(self, upstream: str, nats_url: str, subject: str) -> None:
        self._proxy, self._publisher = FaultProxy(upstream), _Publisher(nats_url, subject)
        self._proxy.on("put", self._put)

    def __enter__(self) -> Notifying:
        self._proxy.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._proxy.__exit__(kind, error, trace)
        self._publisher.close()

    @property
    def url(self) -> str:
        return self._proxy.url

    def _put(self, exchange: Exchange) -> Answer:
        answer = exchange.forward()
        if answer.status == 200:
            bucket = exchange.target.lstrip("/").partition("/")[0]
            document = notification(bucket, exchange.key, len(exchange.body))
            self._publisher.publish(json.dumps(document).encode())
        return answer


class _Publisher:
    """The least of a NATS client: publishes from any thread, answers pings."""

    def __init__(self, url: str, subject: str) -> None:
        address = urlsplit(url)
        self._subject, self._lock = subject.encode(), threading.Lock()
        self._socket = socket.create_connection((address.hostname, address.port))
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false,"lang":"test","version":"0"}\r\n')
        self._reader = threading.Thread(target=self._answer, daemon=True)
        self._reader.start()

    def publish(self, payload: bytes) -> None:
        with self._lock:
            self._socket.sendall(b"PUB %b %d\r\n%b\r\n" % (self._subject, len(payload), payload))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _answer(self) -> None:
        with suppress(OSError):
            while received := self._socket.recv(65536):
                if b"PING" in received:
                    with self._lock:
                        self._socket.sendall(b"PONG\r\n")
