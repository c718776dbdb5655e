"""Files of a local object store that are not objects: new ones being written, locks, metadata."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

HIDDEN = ".floe-objects"
ABANDONED_AFTER = 86_400.0  # seconds until a file that a crash left half-written is removed
_MODE = 0o700


class HiddenFolder:
    """The folder `HIDDEN` of one store; made when something is first written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def new_file(self) -> Iterator[tuple[BinaryIO, Path]]:
        """A new file on the file system of the store, for renaming or linking into place."""
        folder = self._folder("new")
        descriptor, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        try:
            with open(descriptor, "wb") as file:
                yield file, path
        finally:
            path.unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove what crashed processes left half-written, judged by the file system's own clock."""
        with self.new_file() as (_, path):
            newest = path.stat().st_mtime
            for other in path.parent.iterdir():
                with suppress(FileNotFoundError):
                    if other.stat().st_mtime < newest - ABANDONED_AFTER:
                        other.unlink()

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the key against other threads and processes; some keys share a lock."""
        path = self._folder("locks") / _digest(key)[:2]
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def metadata(self, key: str, sha256: str) -> dict[str, str]:
        """What `keep_metadata` was given for these bytes under this key; empty if nothing."""
        with suppress(FileNotFoundError):
            found: dict[str, str] = json.loads(self._metadata_path(key, sha256).read_bytes())
            return found
        return {}

    def keep_metadata(self, key: str, sha256: str, metadata: Mapping[str, str]) -> None:
        """Keep metadata beside what other bytes of the same key have, so that a crash loses neither."""
        path = self._metadata_path(key, sha256)
        if not metadata:
            path.unlink(missing_ok=True)
            return
        make_folder(path.parent)
        with self.new_file() as (file, new):
            file.write(json.dumps(dict(metadata)).encode())
            sync(file)
            new.replace(path)
        sync_folder(path.parent)

    def drop_metadata(self, key: str, *, but: str = "") -> None:
        """Forget the metadata of `key`, except that of the bytes with the SHA-256 `but`."""
        folder = self._metadata_folder(key)
        for path in folder.iterdir() if folder.exists() else ():
            if path.name != but:
                path.unlink(missing_ok=True)

    def _metadata_path(self, key: str, sha256: str) -> Path:
        return self._metadata_folder(key) / sha256

    def _metadata_folder(self, key: str) -> Path:
        digest = _digest(key)
        return self._path / "metadata" / digest[:2] / digest[2:]

    def _folder(self, name: str) -> Path:
        make_folder(self._path / name)
        return self._path / name


def make_folder(path: Path) -> None:
    """Make `path` and what is above it, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=_MODE)
        sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Return when the content of `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return when the names in the folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_unique_time(path: Path) -> None:
    """Give the file a time of change, right to the millisecond, that no other version of it has."""
    # The kernel's clock ticks every few milliseconds and inodes are used again, so two versions written one
    # after the other could else look the same to `put_if_match`.
    changed = path.stat().st_mtime_ns
    unique = changed - changed % 1_000_000 + secrets.randbelow(1_000_000)
    os.utime(path, ns=(unique, unique))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
