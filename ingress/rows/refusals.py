"""Rows that the target would refuse for good: which, why, and what an operator does about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.errors import Stopped
from common.segments.columns import messages
from common.segments.segment import Message
from common.service.pasting import ways
from ingress.checkpoints.commands import set_command
from ingress.hints import resume, set_position


@dataclass(frozen=True, slots=True)
class Oversize:
    """A message that is too large for the target: `what` of it `needs` so many bytes, the target `takes`
    so many."""

    message: Message
    what: str
    needs: int
    takes: int

    @property
    def why(self) -> str:
        return f"the {self.what} needs {self.needs} bytes, the target takes {self.takes}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first row that the target would refuse: its index, a code, and why."""

    row: int
    code: str
    why: str


class RowRefused(Stopped):
    """A row that the target would refuse for good; `why` says it without naming the row."""

    def __init__(self, chain: Chain, sequence: int, refusal: Refusal, hint: str) -> None:
        message = f"chain {chain} stops at sequence {sequence}: {refusal.why}"
        super().__init__(message, hint=hint, code=refusal.code)
        self.why = refusal.why


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes by row of something that has a limit, and the limit."""

    what: str
    sizes: list[int]
    most: int

    def rows(self) -> list[int]:
        """The rows above it."""
        if max(self.sizes) <= self.most:
            return []
        return [row for row, size in enumerate(self.sizes) if size > self.most]


def first_refusal(refusal: Refusal | None, limits: tuple[Limit, ...]) -> Refusal | None:
    """The refusal of the first row: `refusal`, or one by a limit."""
    for limit in limits:
        for row in limit.rows()[:1]:
            if refusal is None or row < refusal.row:
                why = f"the {limit.what} needs {limit.sizes[row]} bytes, the target takes {limit.most}"
                refusal = Refusal(row, "E-MSG-TOO-LARGE", why)
    return refusal


def oversize(batch: pa.RecordBatch, limits: tuple[Limit, ...], stop: int) -> tuple[Oversize, ...]:
    """The rows in front of `stop` that are above a limit, each by the first of them."""
    over = {row: limit for limit in reversed(limits) for row in limit.rows() if row < stop}
    return tuple(
        Oversize(next(messages(batch.slice(row, 1))), limit.what, limit.sizes[row], limit.most)
        for row, limit in sorted(over.items(), key=lambda item: item[0])
    )


def without(batch: pa.RecordBatch, sequences: tuple[int, ...]) -> pa.RecordBatch:
    """`batch` without the rows of `sequences`."""
    if not sequences:
        return batch
    column: Any = batch.column("sequence")
    mask: Any = pc.invert(pc.is_in(column, value_set=pa.array(sequences, pa.int64())))
    return batch.filter(mask)


def way_out(chain: Chain, target: str, code: str, sequence: int) -> str:
    """What an operator does about a row that the target would refuse."""
    again, skip = resume(target, chain), set_position(target, chain, sequence + 1)
    if code == "E-SUBJECT":
        mend, other = "let the target take the subject", "change the subject rules of this source"
    else:
        mend, other = "raise max_payload or the target's max_msg_size", "set `on_oversize: park`"
    looked = f"{mend}, then have it looked at at once"
    return ways((looked, again), (f"or {other}, and start ingress again; or skip it", skip))


def oversize_hint(target: str) -> str:
    """What is done about a row of the open intent that is too large: the intent is finished as it stands."""
    return ways(
        "connect to a server with the former max_payload, or raise it and the target's max_msg_size again: "
        "it goes on by itself",
        (
            "or drop the rest of the intent, so that the chain stops or parks instead",
            set_command(target, "--accept --yes"),
        ),
    )
