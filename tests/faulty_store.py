"""An object store that misbehaves as a test says; everything else goes to the real one behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from common.objects.port import ObjectStore

Fault = Callable[..., Any]


class FaultyStore:
    """Passes each verb on, unless `faults` has something to do instead on that pass (1 is the first).

    A fault is called with the real verb and its arguments. `calls` counts every verb.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._faults: dict[tuple[str, int | None], Fault] = {}
        self.calls: Counter[str] = Counter()
        self.keys: list[tuple[str, str]] = []

    def on(self, verb: str, fault: Fault, *, nth: int | None = None) -> FaultyStore:
        """Let `fault` answer pass `nth` of `verb`, or every pass."""
        self._faults[verb, nth] = fault
        return self

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._objects, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[verb] += 1
            self.keys.append((verb, args[0]))
            fault = self._faults.get((verb, self.calls[verb])) or self._faults.get((verb, None))
            return fault(real, *args, **kwargs) if fault else real(*args, **kwargs)

        return call


def raising(error: BaseException, *, after: bool = False) -> Fault:
    """A fault that raises `error`, having done the work before if `after`."""

    def fault(real: Fault, *args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        raise error

    return fault


def answering(value: Any, *, after: bool = False) -> Fault:
    """A fault that answers `value`, having done the work before if `after`."""

    def fault(real: Fault, *args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        return value

    return fault
