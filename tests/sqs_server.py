"""moto's server, a process of its own: SQS over HTTP, and S3 that notifies nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType
from typing import Any

import boto3

from infra.local.process import free_ports, spawn
from tests.support import eventually, unique

# Credentials that moto does not check.
CREDENTIALS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
_RUN = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class SqsServer:
    """Started by `with`; `url` is its address on loopback."""

    def __init__(self) -> None:
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SqsServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, empty."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = spawn(
            [sys.executable, "-c", _RUN, str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        eventually(self._answers)

    def stop(self) -> None:
        """SIGKILL; what it held is gone."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Any:
        """A client of the test's own."""
        return boto3.session.Session().client("sqs", endpoint_url=self.url, **CREDENTIALS)

    def new_queue(self, name: str = "", **attributes: str) -> str:
        """Make a queue; its name."""
        name = name or unique("floe-events")
        self.client().create_queue(QueueName=name, Attributes=attributes)
        return name

    def send(self, name: str, *bodies: str) -> None:
        """Put messages into a queue."""
        client, url = self._queue(name)
        for body in bodies:
            client.send_message(QueueUrl=url, MessageBody=body)

    def left_in(self, name: str) -> int:
        """How many messages the queue holds, those received and not deleted included."""
        client, url = self._queue(name)
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=names)
        return sum(map(int, answer["Attributes"].values()))

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
