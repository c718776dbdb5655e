"""The spool: a private folder for segment files on their way into and out of the store.

Nothing in it is needed to resume. Nothing in it is named from data. What a killed process left behind is
removed by the next one: each folder is locked while its process lives, and an unlocked one is nobody's.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

from common.errors import Unavailable

_PREFIX = "floe-spool-"
_LOCK = "lock"


class Spool:
    """A folder of mode 0700 under `parent` (None: the system's temporary folder), made on first use.

    It is removed when the process ends. Safe to use from several threads. Raises Unavailable, code E-SPOOL,
    where the disk is full or read-only.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        self._guard = threading.Lock()
        self._folder: Path | None = None
        self._lock: int | None = None
        self._owner = 0

    def new_file(self) -> Path:
        """A new empty file of mode 0600."""
        try:
            handle, name = tempfile.mkstemp(dir=self._private_folder())
        except OSError as error:
            raise spool_error(self._parent, error) from error
        os.close(handle)
        return Path(name)

    def close(self) -> None:
        """Remove the folder with all that is in it; `new_file` makes another."""
        with self._guard:
            folder, lock = self._folder, self._lock
            self._folder = self._lock = None
        # A process that was forked from the owner has a copy of this object, and no right to the folder.
        if folder is not None and lock is not None and os.getpid() == self._owner:
            atexit.unregister(self.close)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _private_folder(self) -> Path:
        with self._guard:
            if self._folder is None or self._owner != os.getpid():
                self._parent.mkdir(parents=True, exist_ok=True)
                _sweep(self._parent)
                self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
                self._lock = _lock_folder(self._folder)
                self._owner = os.getpid()
                atexit.register(self.close)
            return self._folder


def spool_error(folder: Path, error: OSError) -> Unavailable:
    """What a failing disk under the spool is to an operator."""
    return Unavailable(
        f"spool folder {folder}: {error}", hint="free space there or set spool_dir", code="E-SPOOL"
    )


def _lock_folder(folder: Path) -> int:
    # Locked under another name first: whoever sees `lock` sees it locked, unless its owner is dead.
    handle = os.open(folder / "locking", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / "locking", folder / _LOCK)
    return handle


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that are gone; what is not ours to remove stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            _remove_if_dead(folder)
        except OSError:
            continue


def _remove_if_dead(folder: Path) -> None:
    # O_NOFOLLOW and the owner: in a shared temporary folder others may lay out names like ours.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
