"""Whether server and account have room for what a restore makes, and what is said where they have not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.jetstream.requests import ApiError
from common.segments.captures import CapturedDeletions
from common.sequences import SequenceRange, Stretch
from ingress.replay.plan import ChainRange, ReplayChain, ReplayPart
from ingress.restore.archive import ArchiveConsumer
from ingress.restore.fold import Fold
from ingress.restore.plan import RestorePlan, RestoreRequest
from ingress.restore.preflight import no_room, out_of_room
from tests.support import compaction
from tests.support.segments import CHAIN, footer_of, message

AT = "2026-01-02T03:04:05Z"
REQUEST = RestoreRequest("site", "S")
MANY = 10  # rows of the plan, of 100 bytes each


def planned(consumers: int = 0, deletions: CapturedDeletions | None = None, **config: Any) -> RestorePlan:
    rows = SequenceRange(1, MANY)
    footer = footer_of([message(n, b"x" * 99, subject=b"s", headers=None) for n in range(1, MANY + 1)])
    part = ReplayPart(Stretch(compaction.ref(1, MANY), rows), footer)
    return RestorePlan(
        REQUEST,
        (ReplayChain(ChainRange(CHAIN, rows), (part,)),),
        CHAIN,
        begin=1,
        end=MANY,
        archived=MANY,
        created=AT,
        config={"name": "S", "storage": "file", **config},
        consumers=(ArchiveConsumer("c", {}, AT, (0, 0), (0, 0), {}, {}),) * consumers,
        deletions=deletions,
    )


GONE = CapturedDeletions(AT, MANY, 3, MANY, ((5, 5), (8, 9)))


@pytest.mark.parametrize(
    ("plan", "stored"),
    [
        (planned(), 10 * 130),
        (planned(storage="memory"), 10 * 116),
        (planned(deletions=GONE), 5 * 130),  # all below 3, and three behind
        (planned(max_msgs=4), 4 * 130),
        (planned(max_bytes=700), 700),
        (planned(max_bytes=700, discard="new"), 10 * 130),
        (planned(max_msgs_per_subject=1), 0),
    ],
)
def test_room_is_counted_as_the_server_does(plan: RestorePlan, stored: int) -> None:
    assert plan.stored == stored


def test_deleted_sequences_of_a_range_are_those_that_a_fold_takes_off() -> None:
    gone = {1, 2, 5, 8, 9}
    fold = Fold({}, GONE)
    for first in range(1, 13):
        for last in range(first, 13):
            assert fold.deleted(SequenceRange(first, last)) == len(gone & {*range(first, last + 1)}), (first, last)


@pytest.mark.parametrize(
    ("plan", "limits", "used", "told"),
    [
        (planned(), {"max_storage": 1299}, {}, "room for 1.3 KiB, found a limit of 1.3 KiB (max_file), of which 0 B"),
        (planned(), {"max_storage": 1300}, {}, None),
        (planned(), {"max_storage": 1300}, {"storage": 1}, "of which 1 B are used"),
        (planned(), {"max_storage": -1, "max_memory": 0}, {}, None),
        (planned(storage="memory"), {"max_memory": 0}, {}, "(max_mem)"),
        (planned(max_bytes=3000), {"max_storage": 3500}, {"reserved_storage": 600}, "600 B are reserved"),
        (planned(max_bytes=3000), {"storage_max_stream_bytes": 2000}, {}, "(disk_max_stream_bytes)"),
        (planned(), {"max_bytes_required": True}, {}, "(max_bytes_required)"),
        (planned(max_bytes=3000), {"max_bytes_required": True}, {}, None),
        (planned(), {"max_streams": 3}, {"streams": 2}, "room for 2 streams, found max_streams 3, of which 2 are used"),
        (planned(), {"max_streams": 4}, {"streams": 2}, None),
        (planned(2), {"max_consumers": 2}, {}, "account: expected 2 consumers and one that reads it back"),
        (planned(2), {"max_consumers": 3}, {}, None),
        (planned(2, max_consumers=2), {"max_consumers": 5}, {}, "stream: expected 2 consumers and one that reads"),
    ],
)
def test_the_limit_of_the_account_that_stands_in_the_way_is_named(
    plan: RestorePlan, limits: dict[str, Any], used: dict[str, Any], told: str | None
) -> None:
    error = no_room(plan, {"limits": limits, **used}, copies=1, streams=2)
    assert (error is None) == (told is None)
    if error is not None and told is not None:
        assert (error.code, error.exit_code) == ("E-RESTORE-ROOM", 78)
        assert told in error.message
        assert "floe restore" in error.hint


def test_only_where_consumers_are_too_many_there_is_a_way_without_them() -> None:
    for limits, words in ((1, "--no-consumers"), (2, "--verify state")):
        error = no_room(planned(2), {"limits": {"max_consumers": limits}}, copies=1, streams=1)
        assert error is not None
        assert error.hint.splitlines()[-1].endswith(words)
    assert no_room(planned(), {"limits": {"max_storage": 2000}}, copies=3, streams=1) is not None


def test_a_cluster_may_find_resources_by_itself() -> None:
    said = ApiError(503, 10023, "insufficient resources")
    found = [out_of_room(said, REQUEST, "S", is_clustered=each) is None for each in (True, False)]
    assert found == [True, False]


FULL = "restore failed: failed to store message sequence 9: write /s/2.blk: no space left on device"
TOO_MANY = 'restore failed: failed to add consumer "odd": maximum consumers limit reached (10026)'


@pytest.mark.parametrize(
    ("number", "description", "limits", "told"),
    [
        (10062, FULL, None, "the disk of the server is full"),
        (10062, TOO_MANY, None, "max_consumers of the account is reached"),
        (10047, "insufficient storage resources available", [{"max_storage": -1}], "max_file_store of the server is"),
        (10047, "insufficient storage resources available", [{"max_storage": 5}], "or max_file of the account, is"),
        (10028, "insufficient memory resources available", None, "or max_mem of the account, is reached"),
        (10027, "maximum number of streams reached", None, "max_streams of the account is reached"),
        (10113, "account requires a stream config to have max bytes set", None, "(max_bytes_required)"),
        (10062, "restore failed: unexpected content", None, None),
        (10130, "stream name already in use, cannot restore", None, None),
    ],
)
def test_what_a_server_without_room_answers_is_told_as_that(
    number: int, description: str, limits: list[dict[str, Any]] | None, told: str | None
) -> None:
    said = ApiError(500, number, description)
    error = out_of_room(said, REQUEST, "S", is_clustered=False, limits=limits)
    assert (error is None) == (told is None)
    if error is None or told is None:
        return
    assert (error.code, error.exit_code) == ("E-RESTORE-ROOM", 78)
    assert told in error.message
    assert ("--no-consumers" in error.hint) is ("consumer" in description)
    drill = out_of_room(said, replace(REQUEST, promote=False), "S", is_clustered=False)
    assert drill is not None
    assert [line.split()[1] for line in drill.hint.splitlines() if line.startswith("floe")] == ["drill"]
