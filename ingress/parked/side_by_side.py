"""Many calls of the object store, a few at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from common.service.threads import Threads

T = TypeVar("T")
R = TypeVar("R")

PARALLEL = 16


async def in_threads(threads: Threads, call: Callable[[T], R], each: Iterable[T]) -> list[R]:
    """What `call` returns for each, in order, PARALLEL of them at a time. Raises what one of them raises."""
    wanted, done = list(each), list[R]()
    for start in range(0, len(wanted), PARALLEL):
        group = wanted[start : start + PARALLEL]
        done += await asyncio.gather(*(threads.run(call, one) for one in group))
    return done
