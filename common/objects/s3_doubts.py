"""Which writes may have been done though no good answer came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# "Not implemented", "busy" and "full" say that nothing was done; other failures may come after the work.
_NOT_DONE = {501, 503, 507}


class Doubts(threading.local):
    """Whether a try of the request that this thread is making may have been done unseen.

    boto3 shows the outcome of the last try only, and a first try whose answer was lost may have been done:
    then `412` on the second means "it is there", perhaps by this very request.
    """

    def __init__(self, not_sent: tuple[type[Exception], ...]) -> None:
        self._not_sent = not_sent
        self._found = False

    def any(self) -> bool:
        """Whether a try since `forget` is in doubt."""
        return self._found

    def forget(self) -> None:
        """Begin a request."""
        self._found = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the doubts as they are, whatever requests are made meanwhile."""
        before = self._found
        try:
            yield
        finally:
            self._found = before

    def note(self, response: Any = None, caught_exception: Exception | None = None, **_: object) -> None:
        """Take the outcome of one try; boto3 calls this after each (its event `needs-retry`)."""
        if caught_exception is not None:
            self._found |= not isinstance(caught_exception, self._not_sent)
        elif response is not None:
            status = response[0].status_code
            self._found |= status >= 500 and status not in _NOT_DONE
