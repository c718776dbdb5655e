"""The body of an answer to a GET, read to the end that was announced for it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.errors import Unavailable
from common.objects.checksums import CHUNK_BYTES

T = TypeVar("T")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class CutShortError(Unavailable):
    """The body ended before the length that was announced, or is not the range that was asked for."""

    default_code = "E-S3-CUT"


class _Stream(Protocol):
    def read(self, amt: int | None = None) -> bytes: ...
    def close(self) -> None: ...


class _Empty(io.BytesIO):
    def read(self, amt: int | None = None) -> bytes:
        return super().read(amt)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes from offset `first`, `length` of them (at least 1) or to the end."""

    first: int
    length: int | None

    def header(self) -> str:
        """The value of the header `Range`."""
        return f"bytes={self.first}-{'' if self.length is None else self.first + self.length - 1}"

    def size_in(self, content_range: str) -> int:
        """The bytes in an answer with this `Content-Range`. Raises CutShortError for another range."""
        match = _CONTENT_RANGE.fullmatch(content_range)
        if not match:
            raise CutShortError(f"expected {self.header()}, found Content-Range {content_range!r:.80}")
        first, last, total = (int(number) for number in match.groups())
        end = total if self.length is None else min(total, self.first + self.length)
        if (first, last + 1) != (self.first, end):
            raise CutShortError(f"expected {self.header()}, found {content_range}")
        return end - first


class AnswerBody:
    """A body and the length it must have; None where the server says nothing about its length."""

    def __init__(self, stream: _Stream, expected: int | None) -> None:
        self._stream = stream
        self._expected = expected
        self._found = 0

    @classmethod
    def empty(cls) -> AnswerBody:
        """No bytes at all."""
        return cls(_Empty(), 0)

    @classmethod
    def of(
        cls, answer: Mapping[str, Any], wanted: ByteRange | None, size: Callable[[], int | None]
    ) -> AnswerBody:
        """The body of `answer`; `size` finds the object's size where the answer announces no length."""
        stream = answer["Body"]
        try:
            if wanted:
                return cls(stream, wanted.size_in(str(answer.get("ContentRange", ""))))
            announced = answer.get("ContentLength")
            return cls(stream, size() if announced is None else int(announced))
        except BaseException:
            stream.close()
            raise

    def use(self, how: Callable[[AnswerBody], T]) -> T:
        """What `how` makes of the body. Raises CutShortError unless it is as long as announced."""
        try:
            result = how(self)
        finally:
            self.close()
        if self._expected is not None and self._found != self._expected:
            raise CutShortError(f"expected {self._expected} bytes, found {self._found}")
        return result

    def close(self) -> None:
        """Give the connection back."""
        self._stream.close()

    def read_all(self) -> bytes:
        """The whole body."""
        content = self._stream.read()
        self._found = len(content)
        return content

    def copy_to(self, path: Path) -> int:
        """Write the body to the file `path`, from its beginning; how many bytes."""
        self._found = 0
        with path.open("wb") as file:
            while chunk := self._stream.read(CHUNK_BYTES):
                self._found += file.write(chunk)
        return self._found
