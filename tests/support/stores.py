"""An object store with faults that a test chooses; everything else goes to the real one behind it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from common.clock import Clock
from common.errors import UnexpectedError
from common.nats.client import FloeClient
from common.objects.local import LocalObjects
from common.objects.port import ConditionalPutRefused, ObjectInfo, ObjectStore
from common.tasks import unexpected
from tests.support.basics import PATIENCE, counted

Fault = Callable[..., Any]


class FaultyStore:
    """A store that passes each verb on, unless `faults` has a fault for that call (1 is the first).

    A fault is called with the real verb and its arguments. `calls` counts every verb.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._faults: dict[tuple[str, int | None], Fault] = {}
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.keys: list[tuple[str, str]] = []

    def on(self, verb: str, fault: Fault, *, nth: int | None = None) -> FaultyStore:
        """Let `fault` answer call `nth` of `verb`, or every call."""
        self._faults[verb, nth] = fault
        return self

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._objects, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[verb] += 1
                nth = self.calls[verb]
            self.keys.append((verb, args[0]))
            fault = self._faults.get((verb, nth)) or self._faults.get((verb, None))
            return fault(real, *args, **kwargs) if fault else real(*args, **kwargs)

        return call


def raising(error: BaseException, *, after: bool = False) -> Fault:
    """Return a fault that raises `error`, after the work if `after`."""

    def fault(real: Fault, *args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        raise error

    return fault


def refusing_conditions(objects: ObjectStore) -> FaultyStore:
    """Return `objects` as a store that takes no put with a condition."""
    refused = raising(ConditionalPutRefused("this store takes no conditions"))
    return FaultyStore(objects).on("put_if_absent", refused).on("put_if_match", refused)


class ClaimsInMemory:
    """Claims of all writers that share it (`common.archive.documents.PutOnceClaims`)."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, int]] = {}
        self._revision = 0

    def claim(self, key: str, body: bytes) -> tuple[bytes, int]:
        self._revision += 1
        return self.held.setdefault(key, (body, self._revision))

    def settle(self, key: str, revision: int) -> None:
        if self.held.get(key, (b"", 0))[1] == revision:
            del self.held[key]


def answering(value: Any) -> Fault:
    """Return a fault that answers `value`, without the work."""
    return lambda *_args, **_named: value


class DatedObjects:
    """A store that dates each object by `clock` at its put. Objects that others put keep the store's time.

    Everything else goes to the real store behind it.
    """

    def __init__(self, objects: ObjectStore, clock: Clock) -> None:
        self._objects, self._clock = objects, clock
        self._stored: dict[str, float] = {}

    def _put(self, verb: str, key: str, *of: Any, **more: Any) -> Any:
        if (done := getattr(self._objects, verb)(key, *of, **more)) is not False:
            self._stored[key] = self._clock.now()
        return done

    put, put_if_absent = partialmethod(_put, "put"), partialmethod(_put, "put_if_absent")
    put_if_match = partialmethod(_put, "put_if_match")

    def delete(self, key: str) -> None:
        self._objects.delete(key)
        self._stored.pop(key, None)

    def head(self, key: str) -> ObjectInfo | None:
        info = self._objects.head(key)
        return info and self._dated(info)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        return [self._dated(info) for info in self._objects.list(prefix, start_after=start_after, limit=limit)]

    def _dated(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(modified=self._stored.get(info.key, info.modified))

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._objects, verb)


class CountingObjects(LocalObjects):
    """A store that counts the bytes of objects that are read."""

    read = 0

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        data = super().get(key, first=first, length=length)
        self.read += len(data or b"")
        return data

    def download(self, key: str, path: Path) -> bool:
        done = super().download(key, path)
        self.read += path.stat().st_size if done else 0
        return done


def count(part: str) -> float:
    """Return how many errors have ended `part` so far."""
    return counted(unexpected.labels(part))


class Throw:
    """A patch: `owner.name` raises the next `times` times that `where` is true of its arguments."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        times: float = 1,
        where: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self.left, self.times, self.where = times, [], where
        real = getattr(owner, name)

        def throw(*args: Any, **kwargs: Any) -> None:
            if self.left and self.where(*args):
                self.left -= 1
                self.times.append(asyncio.get_running_loop().time())
                raise MemoryError("no room")

        def plain(*args: Any, **kwargs: Any) -> Any:
            throw(*args, **kwargs)
            return real(*args, **kwargs)

        async def waiting(*args: Any, **kwargs: Any) -> Any:
            throw(*args, **kwargs)
            return await real(*args, **kwargs)

        monkeypatch.setattr(owner, name, waiting if inspect.iscoroutinefunction(real) else plain)


def no_room(*_: object) -> None:
    """A callback that raises."""
    raise MemoryError("no room")


def break_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every later subscription raise at its first message; its owner is informed as usual."""
    real = FloeClient.subscribe_raw

    async def subscribe(client: FloeClient, subject: str, _sink: Any, *args: Any) -> Any:
        return await real(client, subject, no_room, *args)

    monkeypatch.setattr(FloeClient, "subscribe_raw", subscribe)


async def fails(work: Awaitable[Any]) -> None:
    """Wait for the error of a `Throw`, wrapped or not."""
    with pytest.raises(Exception) as caught:
        await asyncio.wait_for(work, PATIENCE)
    assert "no room" in UnexpectedError.wrap(caught.value).message
