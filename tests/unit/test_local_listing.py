"""Listings of a local store: in key order, from any key on, and while objects come and go."""

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.objects.local import LocalObjects

PARTS = st.sampled_from(["a", "a!", "a-b", "a0", "b", "é", "z"])
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
BEGINNINGS = st.tuples(KEYS, st.integers(0, 6)).map(lambda found: found[0][: found[1]])


@given(st.sets(KEYS, max_size=15), BEGINNINGS, BEGINNINGS, st.one_of(st.none(), st.integers(0, 4)))
def test_any_part_of_a_tree_is_listed_in_key_order(keys: set[str], prefix: str, after: str, limit: int | None) -> None:
    held = [key for key in keys if not any(other.startswith(f"{key}/") for other in keys)]
    with tempfile.TemporaryDirectory() as name:
        for key in held:
            path = Path(name, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        found = [info.key for info in LocalObjects(Path(name)).list(prefix, start_after=after, limit=limit)]
    wanted = [k for k in held if k.startswith(prefix) and k.encode() > after.encode()]
    assert found == sorted(wanted, key=str.encode)[:limit]


def test_what_moves_to_a_later_folder_while_it_is_listed_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    objects, look_up = LocalObjects(tmp_path), os.lstat
    objects.put("p/level=0/a", b"1")
    objects.put("p/level=1/z", b"1")

    def moving(path: str) -> os.stat_result:
        if path == f"{tmp_path}/p/level=0/a":
            Path(path).replace(tmp_path / "p/level=1/b")
        return look_up(path)

    monkeypatch.setattr(os, "lstat", moving)
    assert [info.key for info in objects.list("p/")] == ["p/level=1/b", "p/level=1/z"]


def test_what_is_deleted_while_it_is_listed_makes_no_page_shorter(tmp_path: Path, monkeypatch: Any) -> None:
    """Keep pages full: a caller takes a short page for the last one."""
    objects, look_up = LocalObjects(tmp_path), os.lstat
    for name in "abcd":
        objects.put(f"p/{name}", b"1")

    def deleting(path: str) -> os.stat_result:
        if path == f"{tmp_path}/p/a":
            Path(path).unlink()
        return look_up(path)

    monkeypatch.setattr(os, "lstat", deleting)
    assert [info.key for info in objects.list("p/", limit=2)] == ["p/b", "p/c"]


def test_names_that_are_no_keys_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "p/b", "p/c\x07", "p\x07/d", "p/\udcff", ".floe-objects/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed = {n: LocalObjects(tmp_path).list("", limit=n) for n in (None, 1, 9)}
    assert {n: [info.key for info in found] for n, found in listed.items()} == {
        None: (keys := ["a", "p/b"]),
        1: ["a"],
        9: keys,
    }
    assert LocalObjects(tmp_path).list(".floe-objects/") == []
