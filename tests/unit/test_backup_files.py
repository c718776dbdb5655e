"""The files of a backup: what an export may overwrite, and what an import refuses before it contacts a server."""

import errno
import io
import json
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from common.errors import Unavailable, UsageError
from common.service.process import ThreadPool
from egress.importing import Backup
from ingress.recovery.fill import BackupFolder, _folder_error, check_folder
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import RestoreRequest
from tests.support.clock import ManualClock

CONFIG, STATE = {"name": "S", "max_age": 5, "sources": [{"name": "O"}]}, {"messages": 2, "first_seq": 3}


def backup(folder: Path, meta: object, *data: str) -> Path:
    (folder / "backup.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    for name in data:
        (folder / name).write_bytes(b"")
    return folder


BAD_FOLDERS = [
    ("{", ("stream.arc.s2",), "configuration and the state"),
    ("[" * 1000, ("stream.arc.s2",), "configuration and the state"),
    (" " * (1 << 20) + "{}", ("stream.arc.s2",), "at most 1048576 bytes"),
    ({"config": CONFIG}, ("stream.arc.s2",), "state"),
    ({"config": {"name": "a.b"}, "state": STATE}, ("stream.arc.s2",), "name of a stream"),
    ({"config": CONFIG, "state": {"messages": 0, "first_seq": 1}}, ("stream.arc.s2",), "expected messages"),
    ({"config": CONFIG, "state": {"messages": "x", "first_seq": 1}}, ("stream.arc.s2",), "invalid literal"),
    ({"config": CONFIG, "state": STATE}, (), "found 0 of them"),
    ({"config": CONFIG, "state": STATE}, ("stream.arc.s2", "stream.tar.s2"), "found 2 of them"),
]


@pytest.mark.parametrize(("meta", "data", "problem"), BAD_FOLDERS)
def test_a_folder_that_is_no_backup_is_refused(
    tmp_path: Path, meta: object, data: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        Backup.open(backup(tmp_path, meta, *data))


@pytest.mark.parametrize("name", ["stream.arc.s2", "stream.tar.s2"])
def test_the_scratch_stream_has_no_limit_and_no_subject_of_the_backup(tmp_path: Path, name: str) -> None:
    found = Backup.open(backup(tmp_path, {"config": CONFIG, "state": STATE}, name))
    scratch = found.scratch_config()
    assert (found.data.name, scratch["name"], scratch["subjects"]) == (name, "S", ["_floe.import.S"])
    assert not {"max_age", "sources"} & set(scratch)


FOLDERS = [
    ("", True),
    ("stream.arc.s2", True),
    ("stream.arc.s2 backup.tmp", True),
    ("backup.json", False),
    ("x", False),
]


@pytest.mark.parametrize(("names", "is_free"), FOLDERS)
def test_only_an_empty_folder_or_a_leftover_is_written(tmp_path: Path, names: str, is_free: bool) -> None:
    for name in names.split():
        (tmp_path / name).write_bytes(b"")
    if is_free:
        check_folder(tmp_path)
        check_folder(tmp_path / "new")
        return
    with pytest.raises(UsageError, match="expected an empty folder or none, found"):
        check_folder(tmp_path)


async def test_a_second_export_into_the_folder_leaves_the_file_of_the_first_alone(tmp_path: Path) -> None:
    with closing(ThreadPool("export", 1)) as threads:
        first, second, third = (BackupFolder(tmp_path, {}, threads, ManualClock()) for _ in range(3))
        await first.send(b"x" * 100_000)
        async with aclosing(second):
            with pytest.raises(Unavailable, match="another export writes there; wait until it is done"):
                await second.send(b"y")
        async with aclosing(first):
            await first.finish()
        async with aclosing(third):
            with pytest.raises(UsageError, match=r"expected an empty folder or none, found backup\.json"):
                await third.send(b"z")
    assert (tmp_path / "stream.arc.s2").read_bytes() == b"x" * 100_000


async def test_a_full_disk_is_reported_though_bytes_are_left_to_write(tmp_path: Path) -> None:
    with closing(ThreadPool("export", 1)) as threads:
        folder = BackupFolder(tmp_path, {}, threads, ManualClock())
        with pytest.raises(Unavailable, match="make room there"):
            async with aclosing(folder):
                folder._file = io.BufferedWriter(io.FileIO("/dev/full", "w"))
                await folder.send(b"head")
                await folder.send(b"x" * (1 << 20))


def test_an_export_is_repeated_by_its_own_command() -> None:
    request = RestoreRequest("us-east", "S", to_sequence=9, verify="state", allow_lossy=True, directory="a b")
    command = repeat_command(request)
    assert command.startswith("floe export -c ")
    assert command.endswith(" us-east/S 'a b' --to-sequence 9 --allow-lossy")


@pytest.mark.parametrize(("number", "act"), [(errno.ENOSPC, "make room there"), (errno.EROFS, "let this user write")])
def test_an_error_of_the_folder_names_its_own_remedy(number: int, act: str) -> None:
    assert act in _folder_error(Path("b"), OSError(number, "why")).hint
