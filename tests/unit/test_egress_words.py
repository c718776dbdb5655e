"""What people read: owners, filters, what is left out, commands to paste."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from common import exits
from common.jetstream.lease import new_owner, owner_text
from egress.incarnations import filters_text
from egress.partition import repartition, resolve
from egress.report import LeftOut, Unmatched


def test_an_owner_is_a_host_and_a_process() -> None:
    owners = {
        "-/vm/370/5ae63413": "vm (process 370)",
        "blue/vm/370/5ae63413": "blue on vm (process 370)",
        "a/b/vm/370/5ae63413": "a/b on vm (process 370)",
        "somebody else": "somebody else",
        "": "",
    }
    assert {owner: owner_text(owner) for owner in owners} == owners
    assert owner_text(new_owner("")).startswith(new_owner("").split("/")[1] + " (process ")


def test_filters_are_words() -> None:
    assert filters_text([""]) == "the whole stream"
    assert filters_text(["a.>"]) == "the filter a.>"
    assert filters_text(["a", "b"]) == "2 partitions (a, b)"
    assert filters_text([f"n{i}" for i in range(10)]) == ("10 partitions (n0, n1, n2, n3, n4, n5, n6, n7 and 2 more)")


def test_what_is_left_out_is_one_sentence() -> None:
    many = LeftOut("nodes.3.>", Unmatched(11, 4, "nodes.3.n11"))
    assert str(many) == ("nodes.3.>: 11 messages on 4 subjects, such as nodes.3.n11, belong to no partition any more")
    assert str(LeftOut("", Unmatched(1, 1, "a"))) == (">: 1 message on 1 subject, a, belongs to no partition any more")
    some = LeftOut("", Unmatched(5, 2, "a", is_complete=False))
    assert str(some).startswith(">: at least 5 messages on 2 subjects, such as a,")


def test_commands_name_the_file_that_was_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = exits.source()
    exits.remember("my site's.yaml")
    path = str(tmp_path / "my site's.yaml")
    assert shlex.split(resolve("F", "--same", 2)) == [
        *("floe", "egress", "resolve", "-c", path, "F", "--partition", "2", "--same")
    ]
    assert shlex.split(repartition("$F")) == ["floe", "egress", "repartition", "-c", path, "$F"]
    assert exits.source() == "my site's.yaml"
    exits.remember(before)
