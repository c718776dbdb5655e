"""The contract of the object store port, which every implementation must fulfil."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from common.errors import ConfigError, Refused, Unavailable
from common.objects import port
from common.objects.local import LocalObjects
from common.objects.open import open_objects, verifies_checksums
from common.objects.s3 import S3Account, S3Objects, S3Options
from common.settings.root import StoreSettings
from tests.sim.store import SimObjects
from tests.sim.strands import Carriers
from tests.sim.world import World
from tests.support.basics import SharedS3, raises_code
from tests.support.basics import counted as reading
from tests.support.proxies import FaultProxy, refusing_conditions

MIB = 1024 * 1024


@pytest.fixture(params=["local", "s3", "simulated"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> port.ObjectStore:
    kind: str = request.param
    if kind == "simulated":  # a store of a world without other events: each call completes at once
        return SimObjects(World(1, Carriers()))
    return s3_objects(request.getfixturevalue("s3")) if kind == "s3" else LocalObjects(tmp_path / "store")


@pytest.fixture
def in_parts() -> S3Options:
    return S3Options(multipart_bytes=6 * MIB, part_bytes=5 * MIB)


def s3_objects(s3: SharedS3, options: S3Options | None = None, url: str = "") -> S3Objects:
    account = S3Account(s3.access_key, s3.secret_key, endpoint_url=url or s3.endpoint_url)
    return S3Objects(s3.new_bucket(), account, options)


def keys(infos: list[port.ObjectInfo]) -> list[str]:
    return [info.key for info in infos]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def head_of(objects: port.ObjectStore, key: str) -> port.ObjectInfo:
    head = objects.head(key)
    assert head is not None
    return head


# Put, get, head, delete


@pytest.mark.parametrize("size", [0, 7, 3_500_000])
def test_what_was_put_comes_back_with_what_is_known_of_it(objects: port.ObjectStore, size: int, tmp_path: Path) -> None:
    content, metadata = random.Random(1).randbytes(size), {"tip": "12:17:00ff", "long-name": "a b=c;%2E"}
    body, copy = tmp_path / "body", tmp_path / "copy"
    body.write_bytes(content)
    for each in (content, body):
        objects.put("a/b=1/c", each, sha256=sha256(content), metadata=metadata)
        assert objects.get("a/b=1/c") == content
        copy.write_bytes(b"x" * 5_000_000)
        assert objects.download("a/b=1/c", copy)
        assert copy.read_bytes() == content
        head, [listed] = head_of(objects, "a/b=1/c"), objects.list("a/")
        assert head == port.ObjectInfo("a/b=1/c", size, listed.modified, listed.etag, sha256(content), metadata)
        assert (listed.size, listed.sha256, listed.metadata) == (size, None, {})
    objects.put("a/b=1/c", b"after", metadata={"b": "2"})
    assert (objects.get("a/b=1/c"), head_of(objects, "a/b=1/c").metadata) == (b"after", {"b": "2"})
    objects.put("a/b=1/c", b"after")
    assert head_of(objects, "a/b=1/c").metadata == {}


def test_a_missing_or_deleted_object_is_none_for_every_reading_verb(objects: port.ObjectStore, tmp_path: Path) -> None:
    for key in ("there/x", "there/y"):
        objects.put(key, b"1", metadata={"k": "v"})
    for key in ("there/y", "there/y", "never/was"):
        objects.delete(key)
    for key in ("missing", "there", "there/y", "there/x/z"):
        assert (objects.get(key), objects.get(key, first=3, length=4)) == (None, None)
        assert (objects.get(key, length=0), objects.head(key)) == (None, None)
        assert not objects.download(key, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert keys(objects.list("")) == ["there/x"]


def test_ranges_are_those_of_slices(objects: port.ObjectStore) -> None:
    content = b"0123456789"
    objects.put("digits", content)
    for first, length in ((0, 10), (3, 4), (9, 1), (5, None), (4, 0), (7, 100), (10, 5), (99, 1)):
        end = None if length is None else first + length
        assert objects.get("digits", first=first, length=length) == content[first:end]
    objects.put("empty", b"")
    assert objects.get("empty", first=0, length=5) == b""


# Checksums


def test_bytes_that_do_not_match_their_checksum_are_refused(objects: port.ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"bad!")
    objects.put("k", b"good")
    for key, write in (("k", objects.put), ("new", objects.put_if_absent)):
        for body in (b"bad!", tmp_path / "body"):
            with pytest.raises(port.ChecksumMismatch):
                write(key, body, sha256=sha256(b"good"))
    assert (objects.get("k"), objects.get("new")) == (b"good", None)
    assert verifies_checksums(objects, "data/_floe/probe/")
    assert keys(objects.list("")) == ["k"]


# Conditions


def test_a_condition_holds_for_what_is_there(objects: port.ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"first")
    assert objects.put_if_absent("k", tmp_path / "body", sha256=sha256(b"first"), metadata={"n": "1"})
    assert not objects.put_if_absent("k", b"second", metadata={"n": "2"})
    assert not objects.put_if_absent("k", tmp_path / "body", metadata={"n": "3"})
    first = head_of(objects, "k")
    assert (objects.get("k"), first.metadata) == (b"first", {"n": "1"})
    assert objects.put_if_match("k", b"two", first.etag)
    assert not objects.put_if_match("k", b"three", first.etag)
    [listed] = objects.list("k")
    assert objects.put_if_match("k", b"four", listed.etag)
    assert objects.get("k") == b"four"
    [listed] = objects.list("k")
    objects.delete("k")
    assert not objects.put_if_match("k", b"five", listed.etag)
    assert objects.get("k") is None


def test_one_of_racing_writers_creates_and_none_of_their_updates_is_lost(objects: port.ObjectStore) -> None:
    with ThreadPoolExecutor(1 if isinstance(objects, SimObjects) else 8) as pool:  # threads of a world take turns
        for turn in range(3):
            won = list(pool.map(lambda n, t=turn: objects.put_if_absent(f"k{t}", b"writer %d" % n), range(8)))
            assert (won.count(True), objects.get(f"k{turn}")) == (1, b"writer %d" % won.index(True))
        objects.put("counter", b"0")

        def add(_: int) -> None:
            while True:
                seen, content = head_of(objects, "counter"), objects.get("counter")
                if objects.put_if_match("counter", b"%d" % (int(content) + 1), seen.etag):
                    return

        list(pool.map(add, range(12)))
    assert objects.get("counter") == b"12"


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_refuses_conditions_holds_nothing_of_it(s3: SharedS3, in_parts: S3Options, status: int) -> None:
    large = bytes(7 * MIB)
    with refusing_conditions(FaultProxy(s3.endpoint_url), status) as proxy:
        for wanted, kind, sent in (
            ("no", port.ConditionalPutRefused, 0),
            ("auto", port.ConditionalPutRefused, 1),
            ("yes", ConfigError, 4),
        ):
            objects = s3_objects(s3, replace(in_parts, conditional_puts=wanted), proxy.url)  # type: ignore[arg-type]
            objects.put("k", b"one")
            proxy.calls.clear()
            for put in (
                lambda: objects.put_if_absent("new", b"x"),  # noqa: B023
                lambda: objects.put_if_match("k", b"x", "etag"),  # noqa: B023
            ) * 2:
                with raises_code(kind, "E-STORE-CONDITIONS", 78) as refused:
                    put()
                assert type(refused.value) is kind
            assert (len(proxy.calls), objects.get("k"), objects.get("new")) == (sent, b"one", None)
        objects = s3_objects(s3, in_parts, proxy.url)
        with pytest.raises(port.ConditionalPutRefused):
            objects.put_if_absent("large", large)
        assert proxy.count("abort") == 1, "no upload is left behind"
        objects.put("large", large)
        assert head_of(objects, "large").size == len(large)


# Listing


def test_a_listing_holds_exactly_the_prefix_in_key_order(objects: port.ObjectStore) -> None:
    names = ["p/b", "p/a/2", "p/a/10", "p/a-b/1", "p/a%2Eb/1", "p/B", "p/x=1/y", "p/a0", "q/1", "pp/1"]
    for name in names:
        objects.put(name, name.encode())
    expected = sorted((n for n in names if n.startswith("p/")), key=str.encode)
    assert keys(objects.list("p/")) == expected
    assert keys(objects.list("p/a")) == [name for name in expected if name.startswith("p/a")]
    assert (keys(objects.list("p/a/")), keys(objects.list(""))) == (["p/a/10", "p/a/2"], [*expected, "pp/1", "q/1"])
    assert objects.list("nothing/") == objects.list("p/b/") == []


def test_a_listing_of_several_pages_is_whole_or_cut_as_asked(
    objects: port.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.objects.s3.KEYS_PER_PAGE", 20)
    names = [f"m%2Ey/a=1/{n:05d}-%2B+ x" for n in range(0, 500, 10)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: objects.put(name, b""), names))

    def listed(start: str, limit: int | None = None) -> list[str]:
        return keys(objects.list("m%2Ey/a=1/", start_after=f"m%2Ey/a=1/{start}", limit=limit))

    assert (keys(objects.list("m%2Ey/a=1/")), keys(objects.list("m%2Ey/", limit=45))) == (names, names[:45])
    assert (listed("00050"), listed("00051"), listed("00050-%2B+ x")) == (names[5:], names[6:], names[6:])
    assert listed("00050", limit=2) == names[5:7]
    assert listed("99999") == objects.list("m%2Ey/a=1/", limit=0) == []


def test_odd_keys_survive_every_verb(objects: port.ObjectStore, tmp_path: Path) -> None:
    for key in (
        *("p=1/a%2Eb/f=c%20d/x", "p/%25/%", "p/a+b c", "p/a&<b>'\"", "p/~!@#$^*()_-[]{}|;:,?", "p/" + "n" * 250),
    ):
        objects.put(key, b"put", metadata={"a": "b"})
        head = head_of(objects, key)
        assert (objects.get(key), head.key) == (b"put", key)
        assert not objects.put_if_absent(key, b"again")
        assert objects.put_if_match(key, b"matched", head.etag)
        assert objects.download(key, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"matched"
        folder = key.rpartition("/")[0] + "/"
        assert keys(objects.list(folder)) == keys(objects.list(key)) == [key]
        assert objects.list(folder, start_after=key) == []
        objects.delete(key)
        assert objects.list("") == []


def test_keys_that_mean_something_else_elsewhere_are_refused(objects: port.ObjectStore, tmp_path: Path) -> None:
    odd = ["", "/a", "a/", "a//b", "a/../b", "..", "./a", "a/.", "a\0b", "a\nb", "\ud800", "k" * 1025]
    for key, call in product(odd, verbs(objects, tmp_path)):
        with raises_code(ConfigError, "E-KEY"):
            call(key)


def verbs(objects: port.ObjectStore, folder: Path) -> list[Callable[[str], object]]:
    """Return each verb that takes a key."""
    return [
        *(objects.get, objects.head, objects.delete),
        lambda key: objects.download(key, folder / "copy"),
        lambda key: objects.put(key, b"2"),
        lambda key: objects.put_if_absent(key, b"2"),
        lambda key: objects.put_if_match(key, b"2", "etag"),
    ]


# Only S3


def test_parts_are_checked_as_a_whole_and_take_conditions(s3: SharedS3, in_parts: S3Options, tmp_path: Path) -> None:
    objects, path, content = s3_objects(s3, in_parts), tmp_path / "segment", random.Random(4).randbytes(11 * MIB)
    path.write_bytes(content)
    with pytest.raises(port.ChecksumMismatch):
        objects.put("k", path, sha256=sha256(b"other"))
    assert objects.head("k") is None
    assert objects.put_if_absent("k", path, sha256=sha256(content), metadata={"tip": "1"})
    head = head_of(objects, "k")
    assert (head.size, head.sha256, head.metadata) == (len(content), None, {"tip": "1"}), "no checksum of the whole"
    assert objects.download("k", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert objects.get("k", first=5 * MIB - 2, length=4) == content[5 * MIB - 2 :][:4]
    assert not objects.put_if_absent("k", content)
    assert objects.put_if_match("k", content + b"1", head.etag)
    assert not objects.put_if_match("k", content + b"2", head.etag)
    assert objects.get("k", first=len(content)) == b"1"


def test_without_sha256_the_probe_fails(s3: SharedS3, in_parts: S3Options) -> None:
    objects = s3_objects(s3, replace(in_parts, checksum="none"))
    for size in (10, 7 * MIB):
        objects.put("k", bytes(size))
        head = head_of(objects, "k")
        assert (head.size, head.sha256) == (size, None)
    assert not verifies_checksums(objects, "data/_floe/probe/")
    assert keys(objects.list("")) == ["k"]


def test_objects_encrypted_by_the_store_come_back_with_their_checksum(s3: SharedS3) -> None:
    cheaper = "REDUCED_REDUNDANCY" if s3.server.name == "MinIO" else "STANDARD_IA"  # MinIO has no other
    objects = s3_objects(s3, S3Options(encryption="sse-s3", storage_class=cheaper))
    objects.put("k", b"secret", sha256=sha256(b"secret"))
    assert (objects.get("k"), head_of(objects, "k").sha256) == (b"secret", sha256(b"secret"))


# Only a local directory


def test_files_copied_into_the_tree_are_objects_and_a_copy_of_it_is_the_same_store(tmp_path: Path) -> None:
    objects = open_objects(StoreSettings.model_validate({"url": f"file://{tmp_path}/a%20b", "prefix": ""}))
    objects.put("a/b", b"ours", metadata={"tip": "1"})
    root = tmp_path / "a b"
    (root / "a" / "c").write_bytes(b"theirs")
    shutil.copytree(root, tmp_path / "copy")
    copy = LocalObjects(tmp_path / "copy")
    assert keys(copy.list("")) == keys(objects.list("")) == ["a/b", "a/c"]
    for key, content, metadata in (("a/b", b"ours", {"tip": "1"}), ("a/c", b"theirs", {})):
        head = head_of(copy, key)
        assert (head.sha256, head.metadata, copy.get(key)) == (sha256(content), metadata, content)
    (root / "a" / "b").write_bytes(b"overwritten by hand")
    assert head_of(objects, "a/b").metadata == {}


def test_a_local_store_shows_nothing_of_its_own_and_is_private(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "store")
    objects.put("a/b", b"1", metadata={"k": "v"})
    assert (keys(objects.list("")), objects.list(".floe")) == (["a/b"], [])
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*")} == {0}
    for key in (".floe-objects/locks/00", "a", "a/b/c", "n" * 256):  # hidden, object and folder, too long
        with raises_code(ConfigError, "E-KEY"):
            objects.put_if_absent(key, b"2")


def test_a_put_leaves_nothing_half_written_and_what_a_crash_left_is_removed_after_a_day(tmp_path: Path) -> None:
    objects, folder = LocalObjects(tmp_path), tmp_path / ".floe-objects" / "new"
    with pytest.raises(port.ChecksumMismatch):
        objects.put("k", b"1", sha256=sha256(b"2"))
    objects.put("k", b"1")
    assert not objects.put_if_absent("k", b"2")
    assert [*folder.iterdir()] == []
    for name, age in (("old", 90_000), ("fresh", 60)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, ((folder / name).stat().st_mtime - age,) * 2)
    LocalObjects(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["fresh"]


def test_a_local_store_whose_folder_went_away_is_not_empty_and_may_come_back(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "store")
    (tmp_path / "store").rmdir()
    for call in (lambda: objects.list("a/"), lambda: objects.get("a"), lambda: objects.put("a", b"")):
        with raises_code(Unavailable, "E-STORE-ROOT", 75, match="no such folder"):
            call()
    (tmp_path / "store").mkdir()
    objects.put("a", b"1")
    assert objects.get("a") == b"1"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_folder_without_hard_links_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("common.objects.local.os.link", refuse)  # exFAT: EPERM; SMB and FUSE: ENOTSUP
    with pytest.raises(ConfigError, match="the file system of the store has no hard links") as caught:
        LocalObjects(tmp_path).put_if_absent("a/k", b"1")
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (78, 1)
    assert LocalObjects(tmp_path).list("") == []


def test_a_folder_that_cannot_be_synced_takes_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not for a folder")

    monkeypatch.setattr("common.objects.local.os.fsync", fsync)
    objects = LocalObjects(tmp_path / "store")
    assert objects.put_if_absent("a/k", b"1")
    assert objects.get("a/k") == b"1"


@pytest.mark.parametrize("kind", ["pipe", "link", "dead link", "socket"])
def test_what_is_no_file_is_refused_by_every_verb_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    objects, path, outside = LocalObjects(tmp_path / "store"), tmp_path / "store" / "a" / "k", tmp_path / "outside"
    objects.put("a/other", b"1")
    outside.write_bytes(b"secret")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    for call in verbs(objects, tmp_path):
        with raises_code(Refused, "E-STORE-DENIED", match="expected a file"):
            call("a/k")
    assert (keys(objects.list("")), outside.read_bytes()) == (["a/other"], b"secret")


def test_a_folder_behind_a_link_is_no_part_of_the_store(tmp_path: Path) -> None:
    objects, outside = LocalObjects(tmp_path / "store"), tmp_path / "outside"
    objects.put("k", b"1")
    outside.mkdir()
    (outside / "k").write_bytes(b"secret")
    (tmp_path / "store" / "a").symlink_to(outside)
    for call in (*verbs(objects, tmp_path), objects.list):
        with pytest.raises(Refused, match="expected a folder"):
            call("a/k" if call != objects.list else "a/")
    assert (keys(objects.list("")), [*outside.iterdir()]) == (["k"], [outside / "k"])
    (tmp_path / "by link").symlink_to(tmp_path / "store")
    assert LocalObjects(tmp_path / "by link").get("k") == b"1"


def test_each_call_is_counted_by_what_came_of_it(tmp_path: Path):
    objects, timed = LocalObjects(tmp_path), port.request_seconds.labels("put")

    def counts() -> list[float]:
        calls = "put ok, put unavailable, get ok, list ok, delete ok, get failed"
        puts = [s.value for f in timed.collect() for s in f.samples if s.name.endswith("_count")]
        return puts + [reading(port.requests.labels(*each.split())) for each in calls.split(", ")]

    before = counts()
    objects.put("a/b", b"x")
    objects.put_if_absent("a/b", b"y")
    assert objects.get("a/none") is None
    objects.list("a/")
    objects.delete("a/b")
    with pytest.raises(port.ChecksumMismatch):
        objects.put("a/c", b"x", sha256="0" * 64)
    with pytest.raises(ConfigError):
        objects.get("a//b")
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [3, 2, 1, 1, 1, 1, 1]
