"""Reading while writing: an iterator whose items are made in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import Queue
from typing import Generic, TypeVar

T = TypeVar("T")


class _End:
    """What follows the last item."""


class _Failed:
    """What follows the last item before an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Ahead(Generic[T]):
    def __init__(self, items: Generator[T, None, None], depth: int) -> None:
        self._items = items
        self._queue: Queue[T | _End | _Failed] = Queue(depth)
        self._is_wanted = True
        self._thread = threading.Thread(target=self._fill, name="floe-ahead", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
                if not self._is_wanted:
                    break
            self._items.close()
            self._queue.put(_End())
        except BaseException as error:  # it is raised where the items are taken
            self._queue.put(_Failed(error))

    def taken(self) -> Iterator[T]:
        while not isinstance(item := self._queue.get(), _End):
            if isinstance(item, _Failed):
                raise item.error
            yield item

    def stop(self) -> None:
        """Make the thread end, whatever it still has to give; returns when it has."""
        self._is_wanted = False
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get()
            self._thread.join(0.01)


def ahead(items: Generator[T, None, None], depth: int = 4) -> Iterator[T]:
    """`items` in their order, up to `depth` of them made before they are asked for; their error at its place.

    When the caller stops early, `items` is closed before this returns.
    """
    making = _Ahead(items, depth)
    try:
        yield from making.taken()
    finally:
        making.stop()
