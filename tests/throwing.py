"""Errors that nobody foresaw, thrown on purpose in a named place."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import Unforeseen
from common.jetstream.client import FloeClient
from common.tasks import unexpected


def count(part: str) -> float:
    """How many errors have ended `part` so far."""
    return unexpected.labels(part)._value.get()  # type: ignore[no-any-return]


class Throw:
    """Has `owner.name` raise the next `times` times, where `where` holds of its arguments."""

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
    """Every subscription from now on throws at its first message; its owner is told as it was to be."""
    real = FloeClient.subscribe_raw

    async def subscribe(client: FloeClient, subject: str, _sink: Any, *tell: Any) -> Any:
        return await real(client, subject, no_room, *tell)

    monkeypatch.setattr(FloeClient, "subscribe_raw", subscribe)


def is_no_room(error: BaseException) -> bool:
    """Whether `error` came of what was thrown, wrapped or not."""
    return "no room" in Unforeseen.of(error).message
