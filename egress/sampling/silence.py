"""Which keys were silent for so long that something is to be told or forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from egress.sampling.key_table import NEVER, Table
from egress.sampling.state import Notice


@dataclass(frozen=True, slots=True)
class Limits:
    """Keys last seen before `timeout`, not after `expire` or not after `forget` (ns) are due.

    Only what was not told yet is due to be told.
    """

    timeout: int
    expire: int
    forget: int


def due_places(table: Table, limits: Limits, most: int) -> list[int]:
    """The first places of keys that are due, so many at most."""
    seen, notices = table.columns()
    silent = _places(pc.less(seen, _time(max(limits.timeout, limits.expire + 1, limits.forget + 1))))
    if not len(silent):
        return []
    due = _due(seen.take(silent), notices.take(silent), limits)
    return cast(list[int], silent.filter(due).slice(0, most).to_pylist())


def _places(mask: pa.BooleanArray) -> pa.Array[pa.UInt64Scalar]:
    return cast("pa.Array[pa.UInt64Scalar]", pc.call_function("indices_nonzero", [mask]))


def _due(seen: pa.Array[Any], notices: pa.Array[Any], limits: Limits) -> pa.BooleanArray:
    forget = pc.less_equal(seen, _time(limits.forget))
    expire = pc.and_(pc.less_equal(seen, _time(limits.expire)), pc.less(notices, _told(Notice.EXPIRE)))
    timeout = pc.and_(pc.less(seen, _time(limits.timeout)), pc.equal(notices, _told(Notice.NONE)))
    return pc.or_(pc.or_(forget, expire), timeout)


def oldest(table: Table) -> tuple[int, int, int]:
    """The least `seen` of keys nothing was told about, of those with a timeout, and of all keys.

    `NEVER` where there is none.
    """
    seen, notices = table.columns()
    least = _least(seen)
    if not len(seen) or not pc.max(notices).as_py():
        return least, NEVER, least
    return _least_told(seen, notices, Notice.NONE), _least_told(seen, notices, Notice.TIMEOUT), least


def _least_told(seen: pa.Array[Any], notices: pa.Array[Any], notice: Notice) -> int:
    # The mask becomes the validity of the column, so that nothing is copied.
    mask = pc.equal(notices, _told(notice))
    validity, values = mask.buffers()[1], seen.buffers()[1]
    return _least(pa.Array.from_buffers(pa.int64(), len(seen), [validity, values]))


def _time(time_ns: int) -> pa.Int64Scalar:
    return pa.scalar(time_ns, pa.int64())


def _told(notice: Notice) -> pa.UInt8Scalar:
    return pa.scalar(int(notice), pa.uint8())


def _least(seen: pa.Array[Any]) -> int:
    least = pc.min(seen).as_py()
    return NEVER if least is None else int(least)
