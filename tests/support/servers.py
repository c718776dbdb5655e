"""A cluster that tests may put streams into."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlsplit

import boto3

from common.errors import OutcomeUnknown, Unavailable
from common.nats.api import create_stream
from common.nats.client import FloeClient, connect
from common.settings.service import NatsSettings
from infra.local.nats import NatsCluster, NatsServer
from infra.local.process import free_ports, spawn
from tests.support.basics import PATIENCE, answered, eventually, unique
from tests.support.proxies import Answer, Exchange, FaultProxy

SETTLED = 10.0  # seconds after which a group that is too small stays so


async def connected(url: str | Sequence[str], name: str = "test", **settings: Any) -> FloeClient:
    return await connect(NatsSettings(url=url, **settings), name=name)  # type: ignore[arg-type]


def placing(cluster: NatsCluster) -> NatsCluster:
    """Return the cluster, once a stream can have a replica on every member.

    A member can be healthy while the leader has not yet learned that it serves JetStream; streams are then
    refused with "no suitable peers". An older server can also leave a member out of the group for good if
    all start at once on a busy machine; such a cluster is started again. Only a creation shows it.
    """
    deadline = time.monotonic() + PATIENCE
    while answer := _refusal(cluster):
        assert time.monotonic() < deadline, f"the cluster places no stream: {answer}"
        for server in cluster.servers:
            server.kill()
            shutil.rmtree(server.store, ignore_errors=True)
        cluster.start()
    _ask(cluster.servers[0], "STREAM.DELETE._READY", {})
    return cluster


def _refusal(cluster: NatsCluster) -> dict[str, Any] | None:
    """Return why the cluster places no stream, after a while; None once it has placed one."""
    config = {"name": "_READY", "storage": "memory", "num_replicas": len(cluster.servers)}
    settled = time.monotonic() + SETTLED
    while "error" in (answer := _ask(cluster.servers[0], "STREAM.CREATE._READY", config)):
        if time.monotonic() > settled:
            return answer
        time.sleep(0.1)
    return None


def _ask(server: NatsServer, request: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the JetStream API to one request, on a connection of its own; an error if there is none: a
    server that loses its leader meanwhile forgets the request.
    """
    body = json.dumps(document).encode()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as link, link.makefile("rwb") as io:
        link.settimeout(SETTLED / 2)
        io.write(b'CONNECT {"verbose":false,"headers":false}\r\nSUB _INBOX.ask 1\r\n')
        io.write(b"PUB $JS.API.%s _INBOX.ask %d\r\n%s\r\n" % (request.encode(), len(body), body))
        io.flush()
        with suppress(TimeoutError):
            for line in io:
                if line.startswith(b"MSG "):
                    return dict(json.loads(io.read(int(line.split()[-1]))))
                if line.startswith(b"PING"):
                    io.write(b"PONG\r\n")
                    io.flush()
            raise AssertionError(f"{server.name} closed the connection before it answered {request}")
    return {"error": f"no answer to {request} within {SETTLED / 2:.0f} s"}


async def place(client: FloeClient, config: dict[str, Any]) -> None:
    """Create a stream. Retries without an answer, as while a cluster chooses a leader: the same configuration
    again changes nothing.
    """
    await answered(lambda: create_stream(client, config), Unavailable, OutcomeUnknown)


async def save_disk(server: NatsServer, folder: Path) -> Path:
    """Copy the server's store as it is now; return the copy."""
    saved = folder / "saved"

    def save() -> None:
        server.stop()
        shutil.copytree(server.store, saved)
        server.start()

    await asyncio.to_thread(save)
    return saved


async def restore_disk(server: NatsServer, saved: Path) -> None:
    """Replace the server's present store by the copy."""

    def restore() -> None:
        server.kill()
        shutil.rmtree(server.store)
        shutil.copytree(saved, server.store)
        server.start()

    await asyncio.to_thread(restore)


# Credentials that moto does not check.
CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
_RUN = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class SqsServer:
    """A server of SQS, started by `with`; `url` is its address on loopback."""

    def __init__(self) -> None:
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SqsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, empty."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        command, quiet = [sys.executable, "-c", _RUN, str(self.port)], subprocess.DEVNULL
        self._process = spawn(command, stdout=quiet, stderr=quiet, env=environment)
        eventually(self._answers)

    def stop(self) -> None:
        """Kill it (SIGKILL); its queues are gone."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Any:
        """Return a client of the test's own."""
        return boto3.session.Session().client("sqs", endpoint_url=self.url, **CREDENTIALS)

    def new_queue(self, name: str = "", **attributes: str) -> str:
        """Make a queue; return its name."""
        name = name or unique("floe-events")
        self.client().create_queue(QueueName=name, Attributes=attributes)
        return name

    def send(self, name: str, *bodies: str) -> None:
        """Put messages into a queue."""
        client, url = self._queue(name)
        for body in bodies:
            client.send_message(QueueUrl=url, MessageBody=body)

    def left_in(self, name: str) -> int:
        """Return the number of messages in the queue, those received and not deleted included."""
        client, url = self._queue(name)
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        return sum(map(int, client.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"].values()))

    def _queue(self, name: str) -> tuple[Any, str]:
        client = self.client()
        return client, client.get_queue_url(QueueName=name)["QueueUrl"]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "moto's server ended"
        try:
            self.client().list_queues()
        except Exception:
            return False
        return True


def notification(bucket: str, key: str, size: int = 1) -> dict[str, Any]:
    """Return MinIO's document for an object that was put; the key in it is form-encoded."""
    stored = {"key": quote_plus(key), "size": size, "sequencer": "15CFEDF8D5304D1A"}
    owned = {"name": bucket, "arn": f"arn:aws:s3:::{bucket}"}
    s3 = {"s3SchemaVersion": "1.0", "configurationId": "Config", "bucket": owned, "object": stored}
    head = {"eventVersion": "2.0", "eventSource": "minio:s3", "awsRegion": "", "eventName": "s3:ObjectCreated:Put"}
    return {"EventName": head["eventName"], "Key": f"{bucket}/{key}", "Records": [{**head, "s3": s3}]}


class Notifying:
    """An S3 server at `url`: the one at `upstream`, with a notification on `subject` after each put."""

    def __init__(self, upstream: str, nats_url: str, subject: str) -> None:
        self._proxy, self._nats_url, self._subject = FaultProxy(upstream), nats_url, subject
        self._proxy.on("put", self._put)

    def __enter__(self) -> Notifying:
        self._proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()

    @property
    def url(self) -> str:
        return self._proxy.url

    def _put(self, exchange: Exchange) -> Answer:
        answer = exchange.forward()
        if answer.status == 200:
            bucket = exchange.target.lstrip("/").partition("/")[0]
            document = notification(bucket, exchange.key, len(exchange.body))
            _publish(self._nats_url, self._subject, json.dumps(document).encode())
        return answer


def _publish(url: str, subject: str, payload: bytes) -> None:
    """Publish one message on a connection of its own, and wait until the server has it."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), PATIENCE) as link, link.makefile("rb") as lines:
        link.sendall(b'CONNECT {"verbose":false}\r\nPUB %b %d\r\n' % (subject.encode(), len(payload)))
        link.sendall(payload + b"\r\nPING\r\n")
        assert any(line.startswith(b"PONG") for line in lines)
