"""Pending requests on one connection, and the errors in answers of the JetStream API."""

import json
from asyncio import Future
from typing import Any

from common.errors import FloeError, OutcomeUnknown, Unavailable

RawAnswer = tuple[bytes, bytes | None]  # payload, raw header block or None

# Error codes of a write that expects another last sequence; the second if another write is in flight.
WRONG_LAST_SEQUENCE_CODES = (10071, 10164)
NO_RESPONDERS_CODE = "E-NO-RESPONDERS"  # the code of Unavailable if no one listens on the subject
# No leader at the moment; a cluster that is incomplete, moves its peers or does not know all of them yet, each for some
# seconds; a write in flight on the same subject.
UNAVAILABLE_CODES = (10004, 10005, 10008, 10075, 10163)


class ApiError(FloeError):
    """JetStream refused a request; nothing was done.

    `status`: as in HTTP, such as 404; `err_code`: JetStream's own number of the cause, such as 10059 (no such stream);
    `description`: the server's words. `code` is `E-JS-` and `err_code`, or the status if there is none.
    """

    def __init__(self, code: int, err_code: int, description: str, *, subject: str = "") -> None:
        where = f" ({subject})" if subject else ""
        message = f"jetstream refused: {description}, error {err_code}{where}"
        super().__init__(message, code=f"E-JS-{err_code or code}")
        self.status, self.err_code, self.description = code, err_code, description


class PendingRequests:
    """The requests that wait for an answer. An inbox is `{prefix}.{token}`; one wildcard subscription feeds `sink`."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, tuple[bytes, Future[RawAnswer]]] = {}
        self._count = 0

    def add(self, subject: bytes, answer: Future[RawAnswer]) -> bytes:
        self._count += 1
        token = b"%x" % self._count
        self._waiting[token] = (subject, answer)
        return token

    def remove(self, token: bytes) -> None:
        self._waiting.pop(token, None)

    def sink(self, subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if (found := self._waiting.get(subject.rpartition(b".")[2])) is not None and not found[1].done():
            found[1].set_result((payload, headers))

    def fail(self, error: FloeError, subject: bytes | None = None) -> None:
        """Raise `error` in all waiting requests, or only in those on `subject`."""
        for requested, answer in self._waiting.values():
            if subject in (None, requested) and not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as retrieved; a waiting caller still gets it, a cancelled one needs none


def api_answer(subject: str, payload: bytes) -> dict[str, Any]:
    """Return the document of a JetStream answer. Raises ApiError, Unavailable; OutcomeUnknown if it is invalid."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise OutcomeUnknown(f"jetstream answered {subject} with {payload[:60]!r}, expected a JSON object")
    if "error" in document:
        raise api_error(document["error"], subject)
    return document


def api_error(error: Any, subject: str) -> FloeError:
    """Return the error for the `error` object of an answer: ApiError, or Unavailable if the error is temporary."""
    if not isinstance(error, dict):
        error = {}
    code, err_code = error.get("code"), error.get("err_code")
    failure = ApiError(
        code if isinstance(code, int) else 0,
        err_code if isinstance(err_code, int) else 0,
        str(error.get("description", "no description")),
        subject=subject,
    )
    if failure.err_code in UNAVAILABLE_CODES:
        return Unavailable(failure.message, code=failure.code)
    return failure
