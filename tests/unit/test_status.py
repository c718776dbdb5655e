"""The output of `floe status`: sizes and times for people, colours, terminal width, the state of a partition."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.archive.heartbeats import ChainHeartbeat, StoredHeartbeat
from common.chain import Chain
from common.cli import print_table
from common.observe.observation import Observation
from common.settings.egress import FeedSettings
from common.settings.types import StyledCell, duration_words, format_age, size_words
from egress.partition import partitions_of
from egress.status import SITE_FORMAT, NatsState, chains_of_status, closing_text, observe_partition, open_segment_text
from tests.support.basics import problems_of

ROOT = Path(__file__).parents[2]
SHOW = """
import fcntl, struct, sys, termios
fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
from common.cli import print_table, terminal_width
from common.settings.types import StyledCell
why = "no segment covers " + "9" * 30 + " of it"
rows = [[StyledCell("stopped", "red"), 5, why, 1], ["fine", 1200, None, 2]]
print_table(rows, ["state", "n", "why", "seq" * 9], terminal_width())
"""


def test_sizes_and_durations_have_units_for_people():
    sizes = [0, 1023, 2150, 1 << 20, 100 << 20, 3 << 39, 1 << 51]
    words = ["0 B", "1,023 B", "2.1 KiB", "1 MiB", "100 MiB", "1.5 TiB", "2,048 TiB"]
    assert [size_words(size) for size in sizes] == words
    durations = {0: "0.0 s", 1.1: "1.1 s", 9.97: "10 s", 271: "4m31s", 3605: "1h", 11_520: "3h12m", 93_784: "1d2h"}
    assert {each: duration_words(each) for each in durations} == durations
    assert [format_age(each) for each in (271, None)] == ["4m31s ago", None]


def on_a_terminal(**environment: str) -> str:
    """Return the output of the script on a terminal of 30 columns."""
    leader, follower = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    env = {**kept, "TERM": "xterm", **environment}
    try:
        command = [sys.executable, "-c", SHOW]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=follower, env=env, check=True)
        return os.read(leader, 65536).decode().replace("\r\n", "\n")
    finally:
        os.close(leader)
        os.close(follower)


def test_a_narrow_terminal_gets_colours_keeps_why_in_whole_words_and_leaves_other_columns_out():
    """Keep a word whole that is wider than the terminal: it may be a key to copy."""
    printed = on_a_terminal()
    assert "\x1b[31mstopped\x1b[0m     5\n" in printed
    assert "\x1b[1mstate" in printed
    why = ["    no segment covers", "    " + "9" * 30, "    of it"]
    assert on_a_terminal(NO_COLOR="1").splitlines() == ["state       n", "stopped     5", *why, "fine     1200"]


def test_a_terminal_that_is_wide_enough_and_a_program_get_all_of_it(capsys: pytest.CaptureFixture[str]):
    rows = [["stopped", "no segment"], ["fine", None]]
    print_table(rows, ["state", "why"], 19)
    assert capsys.readouterr().out == "state    why\nstopped  no segment\nfine     -\n"
    print_table(rows, ["state", "why"], 18)
    assert capsys.readouterr().out == "state\nstopped\n    no segment\nfine\n"
    print_table([[StyledCell("stopped", "red"), 5, "x" * 200]], ["state", "n", "why"])
    assert capsys.readouterr().out.splitlines()[1] == "stopped  5  " + "x" * 200


# The centre


def test_the_centre_makes_up_no_lag_where_a_tail_cannot_be_read():
    sign = StoredHeartbeat(
        ChainHeartbeat("reading", 0.0, source_last=90, end=0, chain=Chain("us-east", "NODES")), 1.0, 5.0, 1.0
    )
    partial = Observation(target="FLEET", chain=CHAIN, position=41, is_end_known=False, egress=sign)
    assert (partial.lag_sequences, partial.source_lag_sequences) == (None, None)
    without = replace(partial, position=None, is_end_known=True)
    assert (without.lag_sequences, without.source_lag_sequences) == (0, 90)


# A site

[PARTITION] = partitions_of("us-east", FeedSettings(stream="NODES"))
CHAIN = PARTITION.chain
HELD = NatsState({CHAIN: "-/host/7/ab"}, {"NODES": 90})
OPEN = {"messages": 12, "bytes": 2150, "age_seconds": 29.4, "closes_in_seconds": 270.6, "max_size": 100 << 20}


def partition_status(**fields: Any) -> Observation:
    known = {"shown": {}, "stored": None, "answers": HELD, "tail": (70, 1000.0), "silent_after": 180.0}
    return observe_partition(PARTITION, CHAIN, **{**known, **fields})


def cells_of(status: Observation, now: float = 0.0) -> dict[str, object]:
    return SITE_FORMAT.cells_of(status, now)


def stored(state: str, *, age: float = 5.0, **fields: Any) -> StoredHeartbeat:
    return StoredHeartbeat(ChainHeartbeat(state, 0.0, chain=CHAIN, **fields), 1000.0, age, 1000.0)


def test_the_process_that_has_the_partition_knows_most():
    page = {"state": "reading", "end": 80, "source_last": 85, "open_segment": OPEN, "why": "", "code": "", "hint": ""}
    status = partition_status(shown=page, stored=stored("reading", end=60))
    assert (status.state, status.archived, status.source, status.unarchived) == ("reading", 80, 90, 10)
    assert (status.known_from, status.needs_operator) == ("monitor", False)
    cells, row = cells_of(status, 1200.0), SITE_FORMAT.row(status)
    assert (cells["holder"], row["holder"]) == ("host (process 7)", "-/host/7/ab")
    assert (cells["open segment"], cells["closes"]) == ("12 messages, 2.1 KiB, 29 s", "in 4m31s or at 100 MiB")
    assert cells["last archived"] == "3m20s ago"
    assert (row["last_archived"], row["open_segment"]) == ("1970-01-01T00:16:40Z", OPEN)
    assert open_segment_text({**OPEN, "messages": 1}).startswith("1 message, ")
    assert closing_text(OPEN) == cells["closes"]


def test_without_it_the_heartbeat_and_the_archive_show_what_they_can():
    sign = stored("stopped", code="E-FORKED", why="an older history", source_last=75)
    status = partition_status(stored=sign)
    shown = status.state, status.code, status.reason, status.archived
    assert shown == ("stopped", "E-FORKED", "an older history", 70)
    assert (status.needs_operator, cells_of(status)["open segment"]) == (True, None)
    assert "egress resolve" in status.hint
    assert problems_of(status.hint) == []
    unasked = partition_status(stored=sign, answers=NatsState(failure="down"))
    assert (unasked.source, unasked.unarchived, cells_of(unasked)["holder"]) == (75, 5, "?")
    assert partition_status(stored=stored("reading", age=600.0)).reason == "no heartbeat for 10m"
    assert partition_status(answers=NatsState(failure="down")).state == "unknown"
    left = partition_status(stored=stored("reading"), answers=NatsState({CHAIN: None}, {"NODES": 90}))
    assert (left.state, left.needs_operator) == ("not held", True)


def test_where_what_is_archived_is_not_known_no_lag_is_made_up():
    unread = partition_status(tail=None, is_store_read=False)
    assert (unread.source, unread.archived, unread.unarchived) == (90, None, None)
    assert (SITE_FORMAT.row(unread)["lag_sequences"], cells_of(unread)["lag"]) == (None, None)
    assert partition_status(tail=(None, 1000.0)).unarchived is None, "a tail that cannot be read"
    assert partition_status(tail=None).unarchived == 90, "the store was read, and holds nothing"
    page = {"state": "reading", "code": "", "why": "", "end": 0}
    reported = partition_status(tail=None, is_store_read=False, shown=page)
    assert reported.unarchived == 90, "the process knows that nothing is"


def test_what_the_stream_had_before_the_chain_begins_is_not_owed():
    status = partition_status(tail=None, shown={"state": "reading", "code": "", "why": "", "end": 0, "first": 91})
    assert (status.archived, status.source, status.unarchived) == (None, 90, 0)
    assert partition_status(tail=None, stored=stored("reading", first=81)).unarchived == 10


def test_those_pages_of_several_workers_count_that_have_the_partition():
    one = {"site": "us-east", "state": "reading", "holder": "this instance"}
    pages = {
        "0": {"parts": {"egress NODES": one, "egress NODES/1": {**one, "state": "standby"}, "heartbeats": {}}},
        "1": {"parts": {"egress NODES/1": {**one, "state": "stopped"}, "egress X": {**one, "site": "eu-west"}}},
        "2": {"pid": 0},
        "3": {"parts": {"egress NODES": {"site": "us-east", "state": "waiting"}}},  # NATS does not answer it
    }
    found = chains_of_status({"workers": pages, "version": "1"}, "us-east")
    assert {chain.partition: page["state"] for chain, page in found.items()} == {0: "reading", 1: "stopped"}
    assert chains_of_status(pages["0"], "us-east") == {CHAIN: one}
