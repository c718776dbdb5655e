"""Making items in a thread while others are used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from compaction.merge import ahead
from tests.support.basics import PATIENCE


def counting(count: int, closed: list[int] | None = None, fail_at: int = -1) -> Iterator[int]:
    try:
        for number in range(count):
            if number == fail_at:
                raise ValueError(f"at {number}")
            yield number
    finally:
        (closed if closed is not None else []).append(1)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("floe-ahead")]


def test_all_items_come_in_their_order_and_an_error_after_those_before_it():
    for count in (0, 1, 100):
        assert list(ahead(counting(count))) == list(range(count))
    taken = []
    with pytest.raises(ValueError, match="at 7"):
        for item in ahead(counting(100, fail_at=7)):
            taken.append(item)
    assert (taken, threads()) == (list(range(7)), [])


def test_the_source_is_closed_when_the_caller_stops_early():
    closed: list[int] = []
    items = ahead(counting(100, closed))
    assert next(items) == 0
    items.close()
    assert (closed, threads()) == ([1], [])


def test_no_more_than_the_depth_is_made_ahead():
    made = []
    released = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 5:
                released.set()
            yield number

    items = ahead(source(), depth=4)
    assert next(items) == 0
    assert released.wait(PATIENCE)
    assert len(made) <= 7
    items.close()
