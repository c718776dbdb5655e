"""A store that notes when it was last answered: that it can be reached is seen by its use, not by asking."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.objects.port import Body, ObjectInfo, ObjectStore

P = ParamSpec("P")
T = TypeVar("T")


class AnsweringStore:
    """`objects`, telling `told` after each call, in whatever thread, whether the server gave an answer.

    A refusal is one, and so is "there is no such object".
    """

    def __init__(self, objects: ObjectStore, told: Callable[[bool], None]) -> None:
        self._objects, self._told = objects, told

    def list(
        self, prefix: str, *, start_after: str = "", limit: int | None = None
    ) -> builtins.list[ObjectInfo]:
        return self._call(self._objects.list, prefix, start_after=start_after, limit=limit)

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        return self._call(self._objects.get, key, first=first, length=length)

    def download(self, key: str, path: Path) -> bool:
        return self._call(self._objects.download, key, path)

    def put(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        self._call(self._objects.put, key, body, sha256=sha256, metadata=metadata)

    def put_if_absent(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> bool:
        return self._call(self._objects.put_if_absent, key, body, sha256=sha256, metadata=metadata)

    def put_if_match(self, key: str, body: Body, etag: str) -> bool:
        return self._call(self._objects.put_if_match, key, body, etag)

    def delete(self, key: str) -> None:
        self._call(self._objects.delete, key)

    def head(self, key: str) -> ObjectInfo | None:
        return self._call(self._objects.head, key)

    def _call(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            answer = verb(*args, **kwargs)
        except (Unavailable, OutcomeUnknown):
            self._told(False)
            raise
        except FloeError:
            self._told(True)
            raise
        self._told(True)
        return answer
