"""A queue of Amazon SQS, reduced to the calls that receiving notifications needs."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.objects.s3 import BotoCoreError, ClientError, S3Account, make_client
from common.objects.s3_errors import without_paths

RECEIVE_BATCH_MESSAGES = 10  # messages of one receive or delete; Amazon's limit
MAX_RECEIVE_WAIT_S = 20  # seconds that a receive may wait; Amazon's limit
SQS_CONNECT_TIMEOUT_S, SQS_ANSWER_TIMEOUT_S = 5.0, 10.0  # seconds; the second on top of the wait

_MISSING = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"}
_REFUSED = {
    "AccessDenied",
    "AccessDeniedException",
    "AWS.SimpleQueueService.AccessDenied",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "UnrecognizedClientException",
    "AuthFailure",
}
_REGION = re.compile(r"sqs\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")


class ReceivedMessage(NamedTuple):
    """A message, and the handle to delete it by."""

    body: str
    receipt: str


class SqsQueue:
    """One queue: its name, or its address without `https://` (`sqs.REGION.amazonaws.com/ACCOUNT/NAME`).

    Blocking; for one thread. The region in an address overrides that of `account`. Raises ConfigError if address or
    region is invalid. Every method raises ConfigError (no such queue), Refused (credential or right), Unavailable.
    """

    def __init__(self, address: str, account: S3Account) -> None:
        self._place = f"sqs://{address}"
        found = _REGION.match(address)
        self._url = f"https://{address}" if "/" in address else None
        self._name = address.rpartition("/")[2]
        self._client = make_client(
            "sqs",
            account if found is None else replace(account, region=found[1]),
            self._place,
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=SQS_CONNECT_TIMEOUT_S,
            read_timeout=MAX_RECEIVE_WAIT_S + SQS_ANSWER_TIMEOUT_S,
        )
        self.region = str(self._client.meta.region_name)

    def receive(self, wait: int = MAX_RECEIVE_WAIT_S) -> list[ReceivedMessage]:
        """Return up to ten messages, as soon as there is one; empty after `wait` seconds (0 to 20)."""
        with self._translate_errors("receive"):
            answer = self._client.receive_message(
                QueueUrl=self.address(), MaxNumberOfMessages=RECEIVE_BATCH_MESSAGES, WaitTimeSeconds=wait
            )
        found = answer.get("Messages") or ()
        return [ReceivedMessage(str(each.get("Body", "")), str(each.get("ReceiptHandle", ""))) for each in found]

    def delete(self, messages: Sequence[ReceivedMessage]) -> int:
        """Remove received messages; return the number that the queue failed to remove: they are delivered again."""
        if not messages:
            return 0
        entries = [{"Id": str(n), "ReceiptHandle": each.receipt} for n, each in enumerate(messages)]
        with self._translate_errors("delete"):
            answer = self._client.delete_message_batch(QueueUrl=self.address(), Entries=entries)
        return len(answer.get("Failed") or ())

    def address(self) -> str:
        if self._url is None:
            self._url = str(self._client.get_queue_url(QueueName=self._name)["QueueUrl"])
        return self._url

    @contextmanager
    def _translate_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise _answer_error(f"{verb} {self._place}", error) from error
        except BotoCoreError as error:
            text = f"{verb} {self._place}: {without_paths(str(error))}"
            raise Unavailable(text, code="E-SQS") from error


def _answer_error(call: str, error: ClientError) -> FloeError:
    answer = error.response.get("Error", {})
    code = str(answer.get("Code", ""))
    text = f"{call}: {code}: {str(answer.get('Message', ''))[:300]}"
    if code in _MISSING:
        return ConfigError(text, hint="create the queue, or correct ingress.events", code="E-SQS-QUEUE")
    if code in _REFUSED:
        hint = "grant sqs:GetQueueUrl, sqs:ReceiveMessage and sqs:DeleteMessage on the queue"
        return Refused(text, hint=hint, code="E-SQS-DENIED")
    return Unavailable(text, code="E-SQS")
