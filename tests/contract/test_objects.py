"""The object store port: what every implementation must do."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from common.chain import Chain
from common.errors import ConfigError, OutcomeUnknown, Refused, Unavailable
from common.objects.local import LocalObjects
from common.objects.open import open_objects, verifies_checksums
from common.objects.port import (
    ChecksumMismatch,
    ConditionsRefused,
    ObjectInfo,
    ObjectStore,
    Timekeeping,
    request_seconds,
    requests,
)
from common.objects.s3 import S3Account, S3Objects, S3Options
from common.segments.keys import Layout
from common.settings.root import StoreSettings
from tests.sim.store import SimObjects
from tests.sim.strands import Carriers
from tests.sim.world import World
from tests.support.basics import PATIENCE, SharedS3
from tests.support.basics import counted as reading
from tests.support.proxies import FaultProxy, refusing_conditions

Body = Callable[[bytes], bytes | Path]


def forbid_links(monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    """Hard links are refused from now on, as on exFAT (EPERM), SMB and FUSE (ENOTSUP)."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("common.objects.local.os.link", refuse)


def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    kind: str = request.param
    if kind == "local without links":
        forbid_links(request.getfixturevalue("monkeypatch"))
    if kind == "simulated":
        yield simulated_objects()
        return
    if kind.startswith("local"):
        yield LocalObjects(tmp_path / "store")
        return
    s3: SharedS3 = request.getfixturevalue("s3")
    if kind == "s3":
        yield s3_objects(s3)
        return
    with refusing_conditions(FaultProxy(s3.endpoint_url), int(kind.rpartition(" ")[2])) as proxy:
        yield S3Objects(s3.new_bucket(), S3Account(s3.access_key, s3.secret_key, endpoint_url=proxy.url))


REFUSING = ["s3, conditions refused with 501", "s3, conditions refused with 400"]


@pytest.fixture(params=["local", "local without links", "s3", "simulated", REFUSING[0]])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    yield from made(request, tmp_path)


@pytest.fixture(params=["local", "local without links", "s3", "simulated"])
def conditional(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """A store that takes conditions."""
    yield from made(request, tmp_path)


@pytest.fixture(params=REFUSING)
def refusing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    yield from made(request, tmp_path)


@pytest.fixture(params=["bytes", "file"])
def body(request: pytest.FixtureRequest, tmp_path: Path) -> Body:
    def make(content: bytes) -> bytes | Path:
        if request.param == "bytes":
            return content
        path = tmp_path / f"body-{len(os.listdir(tmp_path))}"
        path.write_bytes(content)
        return path

    return make


def simulated_objects() -> SimObjects:
    """A store of a world in which nothing else happens: each call is done at once."""
    return SimObjects(World(1, Carriers()))


def s3_objects(s3: SharedS3, options: S3Options | None = None) -> S3Objects:
    account = S3Account(s3.access_key, s3.secret_key, endpoint_url=s3.endpoint_url)
    return S3Objects(s3.new_bucket(), account, options)


def keys(infos: list[ObjectInfo]) -> list[str]:
    return [info.key for info in infos]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Put, get, head, delete


def test_what_was_put_comes_back_byte_for_byte(objects: ObjectStore, body: Body) -> None:
    content = random.Random(1).randbytes(300_000)
    objects.put("a/b=1/c.parquet", body(content), sha256=sha256(content))
    assert objects.get("a/b=1/c.parquet") == content


def test_put_replaces_what_was_there(objects: ObjectStore) -> None:
    objects.put("k", b"before")
    objects.put("k", b"after, and longer")
    assert objects.get("k") == b"after, and longer"


def test_a_listing_and_a_head_tell_one_time(objects: ObjectStore) -> None:
    objects.put("k", b"1")
    head = objects.head("k")
    assert head is not None
    assert [info.modified for info in objects.list("")] == [head.modified]


def test_its_time_is_told_without_a_write(objects: ObjectStore) -> None:
    if isinstance(objects, SimObjects):
        pytest.skip("the simulated store answers no question of the time")
    assert isinstance(objects, Timekeeping)
    objects.put("a/b", b"x")
    info, now = objects.head("a/b"), objects.now("a/")
    assert info is not None
    assert now is not None
    assert 0 <= now - info.modified + 1 < PATIENCE, "both may be whole seconds"
    assert [each.key for each in objects.list("")] == ["a/b"]


def test_an_empty_object_is_an_object(objects: ObjectStore, body: Body, tmp_path: Path) -> None:
    objects.put("empty", body(b""), sha256=sha256(b""))
    assert objects.get("empty") == b""
    assert objects.get("empty", first=0, length=5) == b""
    head = objects.head("empty")
    assert head is not None
    assert head.size == 0
    assert objects.download("empty", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_missing_object_is_none_for_every_reading_verb(objects: ObjectStore, tmp_path: Path) -> None:
    objects.put("there/x", b"1")
    for key in ("missing", "there", "there/y", "there/x/z"):
        assert objects.get(key) is None
        assert objects.get(key, first=3, length=4) is None
        assert objects.get(key, length=0) is None
        assert objects.head(key) is None
        assert not objects.download(key, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("first", "length"), [(0, 1), (0, 10), (3, 4), (9, 1), (5, None), (0, None), (4, 0), (7, 100), (10, 5), (99, 1)]
)
def test_ranges_are_those_of_slices(objects: ObjectStore, first: int, length: int | None) -> None:
    content = b"0123456789"
    objects.put("digits", content)
    end = None if length is None else first + length
    assert objects.get("digits", first=first, length=length) == content[first:end]


def test_download_writes_the_whole_object(objects: ObjectStore, tmp_path: Path) -> None:
    content = random.Random(2).randbytes(3_500_000)
    objects.put("big", content)
    path = tmp_path / "spool"
    path.write_bytes(b"x" * 5_000_000)
    assert objects.download("big", path)
    assert path.read_bytes() == content


def test_delete_removes_and_is_no_error_when_there_is_nothing(objects: ObjectStore) -> None:
    objects.put("a/b", b"1", metadata={"k": "v"})
    objects.delete("a/b")
    objects.delete("a/b")
    objects.delete("never/was")
    assert objects.get("a/b") is None
    assert objects.list("") == []


def test_head_tells_size_time_checksum_and_metadata(objects: ObjectStore, body: Body) -> None:
    metadata = {"tip": "12:1700000000000000000:00ff", "format": "1", "long-name": "a b=c;%2E"}
    objects.put("a/k", body(b"content"), sha256=sha256(b"content"), metadata=metadata)
    head = objects.head("a/k")
    assert head is not None
    assert (head.key, head.size, head.sha256) == ("a/k", 7, sha256(b"content"))
    assert head.metadata == metadata
    assert head.modified > 1_700_000_000
    listed = objects.list("a/")[0]
    assert (listed.etag, listed.size) == (head.etag, head.size)
    assert abs(listed.modified - head.modified) <= 1
    assert (listed.sha256, listed.metadata) == (None, {})


def test_replacing_an_object_replaces_its_metadata(objects: ObjectStore) -> None:
    objects.put("k", b"1", metadata={"a": "1"})
    objects.put("k", b"2", metadata={"b": "2"})
    assert objects.head("k").metadata == {"b": "2"}  # type: ignore[union-attr]
    objects.put("k", b"2")
    assert objects.head("k").metadata == {}  # type: ignore[union-attr]


# Checksums


def test_bytes_that_are_not_what_their_checksum_says_are_refused(conditional: ObjectStore, body: Body) -> None:
    conditional.put("k", b"good")
    for write in (conditional.put, conditional.put_if_absent):
        with pytest.raises(ChecksumMismatch):
            write("k" if write == conditional.put else "new", body(b"bad!"), sha256=sha256(b"good"))
    assert conditional.get("k") == b"good"
    assert conditional.get("new") is None


def test_the_probe_finds_that_checksums_are_verified_and_leaves_nothing(objects: ObjectStore) -> None:
    assert verifies_checksums(objects, "data/_floe/probe/")
    assert objects.list("") == []


# Conditions


def test_put_if_absent_writes_once(conditional: ObjectStore, body: Body) -> None:
    assert conditional.put_if_absent("k", body(b"first"), sha256=sha256(b"first"), metadata={"n": "1"})
    assert not conditional.put_if_absent("k", body(b"second"), metadata={"n": "2"})
    assert not conditional.put_if_absent("k", body(b"first"), metadata={"n": "3"})
    head = conditional.head("k")
    assert conditional.get("k") == b"first"
    assert head is not None
    assert head.metadata == {"n": "1"}


def test_put_if_match_replaces_only_the_version_it_names(conditional: ObjectStore) -> None:
    conditional.put("k", b"one")
    first = conditional.head("k")
    assert first is not None
    assert conditional.put_if_match("k", b"two", first.etag)
    assert not conditional.put_if_match("k", b"three", first.etag)
    assert conditional.put_if_match("k", b"four", conditional.list("k")[0].etag)
    assert conditional.get("k") == b"four"


def test_put_if_match_refuses_where_the_object_is_gone(conditional: ObjectStore) -> None:
    conditional.put("k", b"one")
    etag = conditional.list("k")[0].etag
    conditional.delete("k")
    assert not conditional.put_if_match("k", b"two", etag)
    assert conditional.get("k") is None


def test_of_eight_racing_writers_one_creates(conditional: ObjectStore) -> None:
    for turn in range(3):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n, t=turn: conditional.put_if_absent(f"k{t}", b"writer %d" % n), range(8)))
        assert won.count(True) == 1
        assert conditional.get(f"k{turn}") == b"writer %d" % won.index(True)


def test_racing_updates_lose_none(conditional: ObjectStore) -> None:
    conditional.put("counter", b"0000")

    def add_three(_: int) -> None:
        done = 0
        while done < 3:
            seen = conditional.head("counter")
            content = conditional.get("counter")
            assert seen is not None
            assert content is not None
            done += update(b"%04d" % (int(content) + 1), seen.etag)

    def update(content: bytes, etag: str) -> bool:
        try:
            return conditional.put_if_match("counter", content, etag)
        except OutcomeUnknown:
            pytest.fail("no answer was lost here")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_three, range(8)))
    assert conditional.get("counter") == b"0024"


def test_a_store_that_refuses_conditions_is_asked_once_and_holds_nothing_of_it(refusing: ObjectStore) -> None:
    refusing.put("k", b"one")
    for _ in range(2):
        with pytest.raises(ConditionsRefused) as refused:
            refusing.put_if_absent("new", b"two")
        assert (refused.value.code, refused.value.exit_code) == ("E-STORE-CONDITIONS", 78)
        with pytest.raises(ConditionsRefused):
            refusing.put_if_match("k", b"two", refusing.list("k")[0].etag)
    assert refusing.get("new") is None
    assert refusing.get("k") == b"one"


@pytest.mark.parametrize("status", [400, 501])
def test_no_condition_is_sent_where_the_store_is_said_to_take_none(s3: SharedS3, status: int) -> None:
    account = S3Account(s3.access_key, s3.secret_key)
    with refusing_conditions(FaultProxy(s3.endpoint_url), status) as proxy:
        account, bucket = replace(account, endpoint_url=proxy.url), s3.new_bucket()
        for wanted, kind, sent in (
            ("no", ConditionsRefused, 0),
            ("auto", ConditionsRefused, 1),
            ("yes", ConfigError, 3),
        ):
            objects = S3Objects(bucket, account, S3Options(conditional_puts=wanted))  # type: ignore[arg-type]
            proxy.calls.clear()
            for _ in range(3):
                with pytest.raises(kind) as refused:
                    objects.put_if_absent("k", b"x")
                assert (type(refused.value), refused.value.code) == (kind, "E-STORE-CONDITIONS")
            assert len(proxy.calls) == sent


def test_conditions_that_are_refused_at_the_end_of_a_large_body_leave_no_upload(
    s3: SharedS3, in_parts: S3Options
) -> None:
    with refusing_conditions(FaultProxy(s3.endpoint_url), 501) as proxy:
        objects = S3Objects(s3.new_bucket(), S3Account(s3.access_key, s3.secret_key, endpoint_url=proxy.url), in_parts)
        with pytest.raises(ConditionsRefused):
            objects.put_if_absent("k", bytes(11 * 1024 * 1024))
        assert proxy.count("abort") == 1
        objects.put("k", bytes(11 * 1024 * 1024))
        assert objects.list("k")[0].size == 11 * 1024 * 1024


# Listing


def test_a_listing_holds_exactly_the_prefix_in_key_order(objects: ObjectStore) -> None:
    names = ["p/b", "p/a/2", "p/a/10", "p/a-b/1", "p/a%2Eb/1", "p/B", "p/x=1/y", "p/a0", "q/1", "p", "pp/1"]
    for name in random.Random(3).sample(names, len(names)):
        if name != "p":
            objects.put(name, name.encode())
    expected = sorted((n for n in names if n.startswith("p/")), key=str.encode)
    assert keys(objects.list("p/")) == expected
    assert keys(objects.list("p/a")) == [name for name in expected if name.startswith("p/a")]
    assert keys(objects.list("p/a/")) == ["p/a/10", "p/a/2"]
    assert keys(objects.list("")) == [*expected, "pp/1", "q/1"]
    assert objects.list("nothing/") == []
    assert objects.list("p/b/") == []


def test_start_after_and_limit_cut_a_listing(objects: ObjectStore) -> None:
    names = [f"p/level=0/{n:020d}-x" for n in range(0, 100, 10)]
    for name in names:
        objects.put(name, b"1")

    def listed(start: str, limit: int | None = None) -> list[str]:
        return keys(objects.list("p/level=0/", start_after=f"p/level=0/{start}", limit=limit))

    assert listed(f"{50:020d}") == names[5:]
    assert listed(f"{51:020d}") == names[6:]
    assert listed(f"{50:020d}-x") == names[6:]
    assert listed(f"{50:020d}", limit=2) == names[5:7]
    assert listed(f"{99:020d}") == []
    assert keys(objects.list("p/level=0/", limit=3)) == names[:3]
    assert objects.list("p/level=0/", limit=0) == []


def test_a_listing_of_more_than_one_page_is_whole(objects: ObjectStore) -> None:
    names = [f"m%2Ey/a=1/{n:05d}-%2B+ x" for n in range(1_203)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: objects.put(name, b""), names))
    assert keys(objects.list("m%2Ey/a=1/")) == names
    assert keys(objects.list("m%2Ey/a=1/", start_after=names[499])) == names[500:]
    assert keys(objects.list("m%2Ey/", limit=1_100)) == names[:1_100]


@pytest.mark.parametrize(
    "key", ["p=1/a%2Eb/f=c%20d/x", "p/%25/%", "p/a+b c", "p/a&<b>'\"", "p/~!@#$^*()_-[]{}|;:,?", "p/" + "n" * 250]
)
def test_odd_keys_survive_every_verb(conditional: ObjectStore, key: str, tmp_path: Path) -> None:
    conditional.put(key, b"put", metadata={"a": "b"})
    head = conditional.head(key)
    assert head is not None
    assert (conditional.get(key), head.key) == (b"put", key)
    assert not conditional.put_if_absent(key, b"again")
    assert conditional.put_if_match(key, b"matched", head.etag)
    assert conditional.download(key, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"matched"
    folder = key.rpartition("/")[0] + "/"
    assert keys(conditional.list(folder)) == keys(conditional.list(key)) == [key]
    assert conditional.list(folder, start_after=key) == []
    conditional.delete(key)
    assert conditional.list("") == []


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a/../b", "..", "./a", "a/.", "a\0b", "a\nb", "\ud800", "k" * 1025]
)
def test_keys_that_mean_something_else_elsewhere_are_refused(objects: ObjectStore, key: str, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: objects.get(key),
        lambda: objects.head(key),
        lambda: objects.put(key, b""),
        lambda: objects.put_if_absent(key, b""),
        lambda: objects.put_if_match(key, b"", "etag"),
        lambda: objects.delete(key),
        lambda: objects.download(key, tmp_path / "copy"),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.code == "E-KEY"


# Only S3


def test_a_large_body_goes_up_in_parts_and_has_no_checksum_of_the_whole(s3: SharedS3, tmp_path: Path) -> None:
    objects = s3_objects(s3)
    content = random.Random(4).randbytes(70 * 1024 * 1024)
    path = tmp_path / "segment"
    path.write_bytes(content)
    assert objects.put_if_absent("big", path, sha256=sha256(content), metadata={"tip": "1"})
    head = objects.head("big")
    assert head is not None
    assert (head.size, head.sha256, head.metadata) == (len(content), None, {"tip": "1"})
    assert objects.download("big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert objects.get("big", first=16 * 1024 * 1024 - 2, length=4) == content[16 * 1024 * 1024 - 2 :][:4]


@pytest.fixture
def in_parts() -> S3Options:
    return S3Options(multipart_bytes=6 * 1024 * 1024, part_bytes=5 * 1024 * 1024)


def test_parts_are_checked_as_a_whole_and_conditions_hold_for_them(s3: SharedS3, in_parts: S3Options) -> None:
    objects = s3_objects(s3, in_parts)
    content = bytes(11 * 1024 * 1024)
    with pytest.raises(ChecksumMismatch):
        objects.put("k", content, sha256=sha256(b"other"))
    assert objects.head("k") is None
    assert objects.put_if_absent("k", content, sha256=sha256(content))
    assert not objects.put_if_absent("k", content)
    etag = objects.list("k")[0].etag
    assert objects.put_if_match("k", content + b"1", etag)
    assert not objects.put_if_match("k", content + b"2", etag)
    assert objects.get("k", first=len(content)) == b"1"


@pytest.mark.parametrize("checksum", ["crc32", "none"])
def test_without_sha256_the_store_keeps_none_and_the_probe_says_so(
    s3: SharedS3, checksum: Literal["crc32", "none"], in_parts: S3Options
) -> None:
    options = replace(in_parts, checksum=checksum)
    objects = s3_objects(s3, options)
    for size in (10, 11 * 1024 * 1024):
        objects.put("k", bytes(size))
        head = objects.head("k")
        assert head is not None
        assert (head.size, head.sha256) == (size, None)
    assert not verifies_checksums(objects)
    assert keys(objects.list("")) == ["k"]


def test_objects_encrypted_by_the_store_come_back_with_their_checksum(s3: SharedS3) -> None:
    cheaper = "REDUCED_REDUNDANCY" if s3.server.name == "MinIO" else "STANDARD_IA"  # MinIO knows no other
    objects = s3_objects(s3, S3Options(encryption="sse-s3", storage_class=cheaper))
    objects.put("k", b"secret", sha256=sha256(b"secret"))
    head = objects.head("k")
    assert head is not None
    assert (objects.get("k"), head.sha256) == (b"secret", sha256(b"secret"))


# From settings


def test_settings_open_an_s3_store(s3: SharedS3) -> None:
    settings = {
        "url": f"s3://{s3.new_bucket()}",
        "prefix": "data",
        "endpoint_url": s3.endpoint_url,
        "access_key_id": s3.access_key,
        "secret_access_key": s3.secret_key,
    }
    store = StoreSettings.model_validate(settings)
    objects, layout = open_objects(store), Layout(store.prefix)
    key = layout.tail(Chain("site", "FEED", 0, 0))
    objects.put(key, b"1")
    assert keys(objects.list("data/")) == [key]


def test_settings_open_a_local_store(tmp_path: Path) -> None:
    store = StoreSettings.model_validate({"url": f"file://{tmp_path}/a%20b", "prefix": ""})
    open_objects(store).put("k", b"1")
    assert (tmp_path / "a b" / "k").read_bytes() == b"1"


# Only a local directory


def test_files_copied_into_the_tree_are_objects(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    objects.put("a/b", b"ours", metadata={"tip": "1"})
    (tmp_path / "a" / "c").write_bytes(b"theirs")
    assert keys(objects.list("")) == ["a/b", "a/c"]
    head = objects.head("a/c")
    assert head is not None
    assert (head.sha256, head.metadata, objects.get("a/c")) == (sha256(b"theirs"), {}, b"theirs")
    (tmp_path / "a" / "b").write_bytes(b"overwritten by hand")
    assert objects.head("a/b").metadata == {}  # type: ignore[union-attr]


def test_a_copy_of_the_whole_tree_is_the_same_store(tmp_path: Path) -> None:
    LocalObjects(tmp_path / "one").put("a/b", b"content", metadata={"tip": "1"})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    head = LocalObjects(tmp_path / "two").head("a/b")
    assert head is not None
    assert (head.sha256, head.metadata) == (sha256(b"content"), {"tip": "1"})


def test_a_local_store_shows_nothing_of_its_own_and_is_private(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "store")
    objects.put("a/b", b"1", metadata={"k": "v"})
    assert keys(objects.list("")) == ["a/b"]
    assert objects.list(".floe") == []
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*")} == {0}
    with pytest.raises(ConfigError):
        objects.get(".floe-objects/locks/00")


def test_a_local_store_leaves_no_file_behind_when_a_put_fails(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    with pytest.raises(ChecksumMismatch):
        objects.put("k", b"1", sha256=sha256(b"2"))
    objects.put("k", b"1")
    assert not objects.put_if_absent("k", b"2")
    assert list((tmp_path / ".floe-objects" / "new").iterdir()) == []


def test_what_a_crash_left_half_written_is_removed_after_a_day(tmp_path: Path) -> None:
    LocalObjects(tmp_path).put("k", b"1")
    old, fresh = (tmp_path / ".floe-objects" / "new" / name for name in ("old", "fresh"))
    for path, age in ((old, 90_000), (fresh, 60)):
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    LocalObjects(tmp_path)
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_local_store_whose_folder_went_away_is_not_empty_and_may_come_back(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "store")
    (tmp_path / "store").rmdir()
    for call in (lambda: objects.list("a/"), lambda: objects.get("a"), lambda: objects.put("a", b"")):
        with pytest.raises(Unavailable, match="no such folder") as caught:
            call()
        assert (caught.value.code, caught.value.exit_code) == ("E-STORE-ROOT", 75)
    (tmp_path / "store").mkdir()
    objects.put("a", b"1")
    assert objects.get("a") == b"1"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_links_the_first_of_many_writers_wins_and_no_placeholder_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    forbid_links(monkeypatch, number)
    objects = LocalObjects(tmp_path)
    assert not objects.has_links()
    seen: list[bytes] = []
    replace_file = Path.replace

    def look_and_replace(new: Path, path: Path) -> Path:
        if path.name == "k":
            assert not os.path.lexists(path), "nothing stands under the key before the whole object"
            seen.append(new.read_bytes())
        return replace_file(new, path)

    monkeypatch.setattr(Path, "replace", look_and_replace)
    bodies = [f"writer {n}".encode() * 1000 for n in range(8)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        won = list(pool.map(lambda body: objects.put_if_absent("a/k", body), bodies))
    assert sum(won) == 1
    assert seen == [bodies[won.index(True)]] == [objects.get("a/k")]


def test_a_file_that_another_put_there_meanwhile_is_never_replaced_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_links(monkeypatch)
    objects = LocalObjects(tmp_path)
    keep = objects._hidden.keep_metadata

    def another_writes(*args: object) -> None:
        (tmp_path / "k").write_bytes(b"theirs")
        keep(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(objects._hidden, "keep_metadata", another_writes)
    assert not objects.put_if_absent("k", b"ours")
    assert objects.get("k") == b"theirs"


def test_a_folder_that_cannot_be_synced_takes_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not for a folder")
        synced(descriptor)

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
    for call in (
        lambda: objects.get("a/k"),
        lambda: objects.head("a/k"),
        lambda: objects.download("a/k", tmp_path / "copy"),
        lambda: objects.put("a/k", b"2"),
        lambda: objects.put_if_absent("a/k", b"2"),
        lambda: objects.put_if_match("a/k", b"2", "etag"),
        lambda: objects.delete("a/k"),
    ):
        with pytest.raises(Refused, match="expected a file") as caught:
            call()
        assert caught.value.code == "E-STORE-DENIED"
    assert keys(objects.list("")) == ["a/other"]
    assert outside.read_bytes() == b"secret"


def test_a_folder_behind_a_link_is_no_part_of_the_store(tmp_path: Path) -> None:
    objects, outside = LocalObjects(tmp_path / "store"), tmp_path / "outside"
    objects.put("k", b"1")
    outside.mkdir()
    (outside / "k").write_bytes(b"secret")
    (tmp_path / "store" / "a").symlink_to(outside)
    for call in (
        lambda: objects.get("a/k"),
        lambda: objects.put("a/b/k", b"2"),
        lambda: objects.delete("a/k"),
        lambda: objects.list("a/"),
    ):
        with pytest.raises(Refused, match="expected a folder"):
            call()
    assert keys(objects.list("")) == ["k"]
    assert [*outside.iterdir()] == [outside / "k"]
    (tmp_path / "by link").symlink_to(tmp_path / "store")
    assert LocalObjects(tmp_path / "by link").get("k") == b"1"


def test_a_local_key_cannot_be_both_object_and_folder(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    objects.put("a/b", b"1")
    for key in ("a", "a/b/c", "n" * 256):
        with pytest.raises(ConfigError) as caught:
            objects.put_if_absent(key, b"2")
        assert caught.value.code == "E-KEY"


def test_each_call_is_counted_by_what_came_of_it(conditional: ObjectStore):
    if isinstance(conditional, SimObjects):
        pytest.skip("the simulated store counts its calls itself")

    def counts() -> dict[str, float]:
        return {f"{op} {result}": reading(requests.labels(op, result)) for op, result in said}

    said = [("put", "ok"), ("put", "unavailable"), ("get", "ok"), ("list", "ok"), ("delete", "ok"), ("get", "failed")]
    timed = request_seconds.labels("put")
    before, puts = counts(), [s.value for f in timed.collect() for s in f.samples if s.name.endswith("_count")]
    conditional.put("a/b", b"x")
    conditional.put_if_absent("a/b", b"y")
    assert conditional.get("a/none") is None
    conditional.list("a/")
    conditional.delete("a/b")
    with pytest.raises(ChecksumMismatch):
        conditional.put("a/c", b"x", sha256="0" * 64)
    with pytest.raises(ConfigError):
        conditional.get("a//b")

    assert {name: value - before[name] for name, value in counts().items()} == {
        "put ok": 2, "put unavailable": 1, "get ok": 1, "list ok": 1, "delete ok": 1, "get failed": 1,
    }  # fmt: skip
    assert [s.value for f in timed.collect() for s in f.samples if s.name.endswith("_count")] == [puts[0] + 3]
