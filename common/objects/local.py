"""The object store port over a local directory: the path of a file under the root is the key of an object.

Files that are copied into the tree are objects too, so a bucket can be restored by hand. Floe's own files are in one
hidden folder; a tree without it is complete except for the objects' metadata.
"""

import builtins
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from heapq import nsmallest
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from common.errors import ConfigError, FloeError, Refused, Unavailable
from common.objects.port import (
    COPY_CHUNK_BYTES,
    MAX_OBJECT_KEY_BYTES,
    Body,
    ChecksumMismatch,
    ObjectInfo,
    check_key,
    check_prefix,
    iter_chunks,
    measure_call,
    open_body,
)

HIDDEN_FOLDER = ".floe-objects"
ABANDONED_AFTER_S = 86_400.0  # seconds until a file that a crash left incomplete is removed
_FOLDER_MODE = 0o700


class HiddenFolder:
    """The folder `HIDDEN_FOLDER` of one store; created at the first write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def new_file(self) -> Iterator[tuple[BinaryIO, Path]]:
        descriptor, name = tempfile.mkstemp(dir=make_folder(self._path / "new"))
        path = Path(name)
        try:
            with open(descriptor, "wb") as file:
                yield file, path
        finally:
            path.unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove incomplete files of crashed processes; their age is judged by the file system's own clock."""
        with self.new_file() as (_, path):
            newest = path.stat().st_mtime
            for other in path.parent.iterdir():
                with suppress(FileNotFoundError):
                    if other.stat().st_mtime < newest - ABANDONED_AFTER_S:
                        other.unlink()

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock the key against other threads and processes; some keys share a lock."""
        path = make_folder(self._path / "locks") / _digest(key)[:2]
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def metadata(self, key: str, sha256: str) -> dict[str, str]:
        """Return the metadata that `store_metadata` stored for these bytes under this key; empty if there is none."""
        with suppress(FileNotFoundError):
            return dict(json.loads((self._metadata_folder(key) / sha256).read_bytes()))
        return {}

    def store_metadata(self, key: str, sha256: str, metadata: Mapping[str, str]) -> None:
        """Store it beside the metadata of other bytes of the same key, so that a crash loses neither."""
        path = self._metadata_folder(key) / sha256
        if not metadata:
            path.unlink(missing_ok=True)
            return
        make_folder(path.parent)
        with self.new_file() as (file, new):
            file.write(json.dumps(dict(metadata)).encode())
            sync(file)
            new.replace(path)
        sync_folder(path.parent)

    def delete_metadata(self, key: str, *, except_sha256: str = "") -> None:
        folder = self._metadata_folder(key)
        for path in folder.iterdir() if folder.exists() else ():
            if path.name != except_sha256:
                path.unlink(missing_ok=True)

    def _metadata_folder(self, key: str) -> Path:
        digest = _digest(key)
        return self._path / "metadata" / digest[:2] / digest[2:]


def existing_parent(path: Path) -> Path:
    """Return `path`, or what exists nearest above it."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def make_folder(path: Path) -> Path:
    """Create `path` and the folders above it, durably; return `path`."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=_FOLDER_MODE)
            sync_folder(path.parent)
    return path


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, if its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # SMB's errors for a folder
            raise
    finally:
        os.close(descriptor)


# The errors at a hard link on file systems without them: exFAT, SMB, many of FUSE.
_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def link(new: Path, path: Path) -> None:
    """Give the file `new` the name `path`. Raises FileExistsError if there is one, ConfigError without hard links."""
    try:
        os.link(new, path)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        hint = "use a folder of another file system, or S3"
        raise ConfigError(f"put {path}: the file system of the store has no hard links", hint=hint) from error


def set_unique_time(path: Path) -> None:
    """Set a modification time, precise to the millisecond, that no other version of the file has."""
    # The kernel's clock ticks every few milliseconds and inodes are reused, so two successive versions could otherwise
    # look the same to `put_if_match`.
    changed = path.stat().st_mtime_ns
    unique = changed - changed % 1_000_000 + secrets.randbelow(1_000_000)
    os.utime(path, ns=(unique, unique))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check_key(key: str) -> None:
    check_key(key)
    if key.partition("/")[0] == HIDDEN_FOLDER:
        raise ConfigError(f"object key {key!r:.200}: expected one outside {HIDDEN_FOLDER}", code="E-KEY")


_NOT_FOUND_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# For an errno of the file system: the error to raise, its hint and its code.
_ERRNO_ERRORS: Mapping[int, tuple[type[FloeError], str, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), (Unavailable, "make room in the store", "E-STORE-FULL")),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        (Refused, "let this user read and write the store's folder", "E-STORE-DENIED"),
    ),
    errno.ENAMETOOLONG: (ConfigError, "a part of a key has at most 255 bytes here", "E-KEY"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR), (ConfigError, "a folder cannot hold both KEY and KEY/MORE", "E-KEY")
    ),
}


class LocalObjects:
    """The objects under `root`, which is created (mode 0700) if it is missing and `creates` is set.

    When a writing verb returns, its change is on the disk. `head` computes `sha256` from the file each time. Raises
    ConfigError if something else than a folder is in the place of `root`, or above it.
    """

    def __init__(self, root: Path, *, creates: bool = True) -> None:
        self._root, self._hidden = root, HiddenFolder(root / HIDDEN_FOLDER)
        self._folder = str(root)  # a listing makes a path for each object: much faster than a Path
        with self._translate_errors("open", ""):
            if not (found := existing_parent(root)).is_dir():
                raise ConfigError(f"store {root}: expected a folder, found a file: {found}", hint="correct store.url")
            if creates:
                make_folder(root)
            self._check_root()
            if (root / HIDDEN_FOLDER).exists() and os.access(root / HIDDEN_FOLDER, os.W_OK):
                self._hidden.remove_abandoned()

    @measure_call("list")
    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> builtins.list[ObjectInfo]:
        check_prefix(prefix)
        folder, slash, stem = prefix.rpartition("/")
        with self._translate_errors("list", prefix):
            self._check_root(prefix)
            return [*islice(self._infos(folder + slash, stem, start_after, limit), limit)]

    @measure_call("get")
    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        if (file := self._open("get", key)) is None:
            return None
        with file, self._translate_errors("get", key):
            file.seek(first)
            # A buffer of `length`, a megabyte for a document, would take longer than the read.
            return file.read(-1 if length is None else min(length, os.fstat(file.fileno()).st_size))

    @measure_call("get")
    def download(self, key: str, path: Path) -> bool:
        if (file := self._open("get", key)) is None:
            return False
        # Unlike errors of the store, errors of `path` belong to the caller and pass unchanged.
        with file, path.open("wb") as copy:
            while chunk := self._read_chunk(key, file):
                copy.write(chunk)
        return True

    @measure_call("put")
    def put(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        self._write(key, body, sha256, metadata, Path.replace, lambda _: True)

    @measure_call("put")
    def put_if_absent(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> bool:
        return self._write(key, body, sha256, metadata, link, lambda found: found is None)

    @measure_call("put")
    def put_if_match(self, key: str, body: Body, etag: str) -> bool:
        return self._write(key, body, None, None, Path.replace, lambda found: found is not None and found.etag == etag)

    @measure_call("delete")
    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translate_errors("delete", key):
            self._check_root(key)
            if self._status(key) is not None:
                with self._hidden.lock(key):
                    path.unlink(missing_ok=True)
                    sync_folder(path.parent)
                    self._hidden.delete_metadata(key)

    @measure_call("head")
    def head(self, key: str) -> ObjectInfo | None:
        if (file := self._open("head", key)) is None:
            return None
        with file, self._translate_errors("head", key):
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return _info(key, os.fstat(file.fileno()), sha256, self._hidden.metadata(key, sha256))

    # Reading

    def _path(self, key: str) -> Path:
        _check_key(key)
        return self._root / key

    def _infos(self, folder: str, stem: str, after: str, limit: int | None) -> Iterator[ObjectInfo]:
        """Yield the objects after `after` whose keys begin with `folder` (empty, or ending in a slash) and `stem`, in
        key order.

        A folder is read when its turn comes, as a server does it. So an object that is put into a later folder and then
        deleted from an earlier one meanwhile is seen in one of them. With a `limit`, names beyond it are not kept.
        """
        left = [(folder, stem, "")]  # the next one at the end; of a folder, the names that are read already
        while left:
            key, stem, begin = left.pop()
            if key and key[-1] != "/":
                if info := self._info(key):
                    yield info
            elif after <= key or after.startswith(key):
                found = self._names(key, stem, after[len(key) :] if after > key else "", begin)
                names = sorted(islice(found, limit))  # all of most folders
                if len(names) == limit:
                    names = nsmallest(limit, chain(names, found))
                    left.append((key, stem, names[-1]))
                left += [(key + name, "", "") for name in reversed(names) if self._is_key(key + name)]

    def _is_key(self, key: str) -> bool:
        """True if `key`, of a file or a folder with a slash at its end, may be that of an object or begin it."""
        if key.isascii() and key.isprintable() and len(key) <= MAX_OBJECT_KEY_BYTES and key[0] != ".":
            return True  # a name in a folder has no slash, and is neither empty nor dots
        with suppress(ConfigError):
            _check_key(key.removesuffix("/"))
            return True
        return False

    def _names(self, folder: str, stem: str, after: str, begin: str) -> Iterator[str]:
        """Yield the names in `folder` that begin with `stem`, in no order, without those up to `begin` or `after`. A
        folder's name ends in a slash, so that names sort as keys do; a folder that contains `after` is kept. As text
        they sort as their bytes do, except for names that are not UTF-8, which are no keys.
        """
        try:
            entries = os.scandir(f"{self._folder}/{folder}")
        except _NOT_FOUND_ERRORS:
            return
        with entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                name = entry.name + "/" if is_folder else entry.name
                is_behind = name > after or (is_folder and after.startswith(name))
                is_named = is_behind and name > begin and name.startswith(stem)
                if is_named and (is_folder or entry.is_file(follow_symlinks=False)):
                    yield name

    def _info(self, key: str) -> ObjectInfo | None:
        return None if (status := self._status(key)) is None else _info(key, status)

    def _status(self, key: str) -> os.stat_result | None:
        """Return the file's status; None if there is no file. Raises Refused for a link, a pipe or a device."""
        try:
            status = os.lstat(f"{self._folder}/{key}")
        except _NOT_FOUND_ERRORS:
            return None
        if not (is_file := stat.S_ISREG(status.st_mode)) and not stat.S_ISDIR(status.st_mode):
            raise _not_regular_error(self._root / key, "a file")
        return status if is_file else None

    def _open(self, verb: str, key: str) -> BufferedIOBase | None:
        _check_key(key)
        with self._translate_errors(verb, key), suppress(*_NOT_FOUND_ERRORS):
            self._check_root(key)
            if self._status(key) is not None:
                # It was a regular file a moment ago: do not follow a link, and do not wait for a pipe.
                return os.fdopen(os.open(f"{self._folder}/{key}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        return None

    def _read_chunk(self, key: str, file: BufferedIOBase) -> bytes:
        with self._translate_errors("get", key):
            return file.read(COPY_CHUNK_BYTES)

    def _check_root(self, key: str = "") -> None:
        """Raise Unavailable if the store is gone, Refused if a folder above `key` is a link."""
        if not os.path.isdir(self._folder):
            hint = "mount or create it, or correct store.url"
            raise Unavailable(f"store {self._root}: no such folder", hint=hint, code="E-STORE-ROOT")
        folder = self._folder
        for part in key.split("/")[:-1]:
            if os.path.islink(folder := f"{folder}/{part}"):
                raise _not_regular_error(Path(folder), "a folder")

    # Writing

    def _write(
        self,
        key: str,
        body: Body,
        sha256: str | None,
        metadata: Mapping[str, str] | None,
        install: Callable[[Path, Path], object],
        may_replace: Callable[[ObjectInfo | None], bool],
    ) -> bool:
        """Write the object; return False if `may_replace` refuses the present one, or `install` finds a new one."""
        path = self._path(key)
        with open_body(body) as source, self._translate_errors("put", key):
            self._check_root(key)
            with self._hidden.new_file() as (file, new):
                found = _copy(source, file)
                if sha256 not in (None, found):
                    raise ChecksumMismatch(f"put {path}: expected SHA-256 {sha256}, found {found}")
                set_unique_time(new)
                sync(file)
                make_folder(path.parent)
                with self._hidden.lock(key):
                    if not may_replace(self._info(key)):
                        return False
                    return self._install(key, found, metadata or {}, lambda: install(new, path))

    def _install(self, key: str, sha256: str, metadata: Mapping[str, str], install: Callable[[], object]) -> bool:
        path = self._root / key
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "objects exist under this key", str(path))
        # Metadata first: a crash between the two leaves metadata of bytes that are never read.
        self._hidden.store_metadata(key, sha256, metadata)
        try:
            install()
        except FileExistsError:
            return False
        sync_folder(path.parent)
        self._hidden.delete_metadata(key, except_sha256=sha256)
        return True

    # Errors

    @contextmanager
    def _translate_errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind, hint, code = _ERRNO_ERRORS.get(error.errno or 0, (Unavailable, "", ""))
            raise kind(f"{verb} {self._root / key}: {error.strerror or error}", hint=hint, code=code) from error


def _not_regular_error(path: Path, expected: str) -> Refused:
    hint = "links are not followed, pipes and devices are not read: put the file itself there, or remove it"
    return Refused(f"store {path}: expected {expected}, found something else", hint=hint, code="E-STORE-DENIED")


def _copy(source: BufferedIOBase, file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for chunk in iter_chunks(source):
        digest.update(chunk)
        file.write(chunk)
    file.flush()
    return digest.hexdigest()


def _info(
    key: str, status: os.stat_result, sha256: str | None = None, metadata: Mapping[str, str] | None = None
) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, status.st_mtime, etag, sha256, metadata or {})
