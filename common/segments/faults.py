"""Whose fault it is when reading a segment fails: the file's, or the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import DataError, FloeError, SegmentCorrupt
from common.segments.segment import SegmentRef


class SegmentGone(DataError):
    """The segment is not in the store any more: deleted, most likely superseded, since it was listed."""

    default_code = "E-SEG-GONE"


class Forked(DataError):
    """Two segments hold different messages under one sequence; `keys` names both."""

    default_code = "E-FORK"

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(
            message,
            hint="two histories met under one name; nothing of them is merged or deleted; compare them with "
            "`floe segments cat`, then put the false one away",
        )
        self.keys = keys

    def __reduce__(self) -> tuple[type[Forked], tuple[str, ...]]:
        return Forked, (self.message, *self.keys)


def fork(one: SegmentRef, other: SegmentRef, sequence: int) -> Forked:
    """The error for two segments that hold different messages under one sequence."""
    return Forked(
        f"sequence {sequence} of {one.chain} has one content in {one.key} and another in {other.key}",
        one.key,
        other.key,
    )


def bomb(cause: str) -> SegmentCorrupt:
    """The error for a file that asks for more than the limits give."""
    return SegmentCorrupt(cause, code="E-SEG-BOMB")


@contextmanager
def explained(key: str) -> Iterator[None]:
    """Turn what reading untrusted bytes may raise into SegmentCorrupt that names `key`.

    Other errors of Floe (the store is away) and of the disk under the file pass as they are.
    """
    try:
        yield
    except SegmentCorrupt as error:
        raise SegmentCorrupt(f"segment {key}: {error.message}", hint=error.hint, code=error.code) from error
    except FloeError:
        raise
    except MemoryError as error:
        raise bomb(f"segment {key}: needs more memory than there is: {_first_line(error)}") from error
    except NotImplementedError as error:
        raise SegmentCorrupt(f"segment {key}: {_first_line(error)}", code="E-SEG-CODEC") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise SegmentCorrupt(f"segment {key}: {_first_line(error)}") from error
    except Exception as error:  # pyarrow's own errors, and the built-in ones that it raises too
        raise SegmentCorrupt(f"segment {key}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
