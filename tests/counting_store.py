"""A store in a folder that counts what is read of it."""

from __future__ import annotations

from pathlib import Path

from common.objects.local import LocalObjects


class CountingObjects(LocalObjects):
    """Counts the bytes of objects that are read."""

    read = 0

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        data = super().get(key, first=first, length=length)
        self.read += len(data or b"")
        return data

    def download(self, key: str, path: Path) -> bool:
        done = super().download(key, path)
        self.read += path.stat().st_size if done else 0
        return done
