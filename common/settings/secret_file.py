"""A secret that stands in a file of its own: it may be changed while the service runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pydantic import SecretStr

from common.service.logs import get_logger

log = get_logger("settings.secret_file")

_KNOWN: list[weakref.ref[FileSecret]] = []


class FileSecret(SecretStr):
    """What `read` found in the file `path`. It stays until somebody has it read again: when it was refused,
    or on SIGHUP. A file that is ahead of its server so does no harm.

    `read` raises ValueError for what is no secret, never with the content.
    """

    def __init__(self, value: str, path: str, read: Callable[[str], str]) -> None:
        super().__init__(value)
        self.path, self._read = path, read
        _KNOWN[:] = [each for each in _KNOWN if each() is not None]
        _KNOWN.append(weakref.ref(self))

    def read_again(self) -> bool:
        """Read the file again; whether the secret is another one now. From any thread."""
        try:
            found = self._read(self.path)
        except ValueError as error:
            log.warning("secret not read again", action="secret_unread", error=str(error))
            return False
        if found == self._secret_value:
            return False
        self._secret_value = found
        log.info("secret read again", action="secret_read", file=self.path)
        return True


def read_all_again() -> None:
    """Read the files of all secrets of this process again."""
    for known in _KNOWN:
        if (secret := known()) is not None:
            secret.read_again()
