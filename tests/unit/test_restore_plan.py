"""The plan of a restore: filters, limits, merges, configurations and consumers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.archive.captures import CapturedConfig, CapturedConsumer, CapturedConsumers, CapturedDeletions, source_key
from common.archive.segment import Message
from common.clock import NS_PER_S
from common.errors import Unavailable
from common.nats.api import RESTORE_KEY
from common.nats.protocol import ApiError
from common.sequences import SequenceRange, Stretch
from ingress.recovery import plan as planning
from ingress.recovery import read_back
from ingress.recovery import read_back as back
from ingress.recovery import stream_archive as form
from ingress.recovery.guard import _server_notes, room_error, room_shortage, stopped_error
from ingress.recovery.history import merge_rows, repeat_command
from ingress.recovery.plan import RestorePlan, RestoreRequest
from ingress.recovery.ranges import ChainRange, ReplayChain, ReplayPart
from ingress.recovery.retention_filter import RetentionFilter, SourcedRow, sourced_rows
from tests.support import compaction
from tests.support.clock import ManualClock
from tests.support.segments import CHAIN, batch_of, footer_of, message

AT = "2026-01-02T03:04:05Z"


def row(sequence: int, subject: bytes = b"a", rollup: str = "") -> Message:
    headers = f"NATS/1.0\r\nNats-Rollup: {rollup}\r\n\r\n".encode() if rollup else None
    return Message(sequence, sequence, subject, headers, b"%d" % sequence)


def filtered(rows: Sequence[Message], size: int, row_filter: RetentionFilter) -> list[int]:
    batches = [batch_of(rows[at : at + size]) for at in range(0, len(rows), size)]
    while row_filter.passes_left:
        for batch in batches:
            row_filter.observe(batch)
        row_filter.end_pass()
    return [s for batch in batches for s in row_filter.filter(batch).column("sequence").to_pylist()]


def test_schedules_that_fired_for_the_last_time_are_gone_and_rollups_mean_nothing_where_they_are_off() -> None:
    assert filtered([row(1), row(2, rollup="all")], 1, RetentionFilter({"max_msgs_per_subject": 5})) == [1, 2]
    for size in (1, 3, 20):

        def fired(sequence: int, of: bytes, following: bytes = b"purge") -> Message:
            block = b"NATS/1.0\r\nNats-Scheduler: %b\r\nNats-Schedule-Next: %b\r\n\r\n" % (of, following)
            return Message(sequence, sequence, b"out", block, b"x")

        rows = [row(1, b"once"), row(2, b"often"), row(3, b"\xff"), fired(4, b"often", b"2026-01-02T03:04:05Z")]
        rows += [fired(5, b"once"), fired(6, b"\xff"), row(7, b"once"), fired(8, b"unknown")]
        row_filter = RetentionFilter({"allow_msg_schedules": True})
        assert filtered(rows, size, row_filter) == [2, 4, 5, 6, 7, 8]
        assert row_filter.rows_left == 6
        assert filtered(rows, size, RetentionFilter({})) == [*range(1, 9)]


def expiring(rows: Sequence[tuple[bytes, int, str]]) -> list[Message]:
    """Return rows, each of a subject, a time in seconds and a `Nats-TTL`, which may be empty."""
    blocks = [f"NATS/1.0\r\nNats-TTL: {ttl}\r\n\r\n".encode() if ttl else None for _, _, ttl in rows]
    return [Message(n, rows[n - 1][1] * NS_PER_S, rows[n - 1][0], blocks[n - 1], b"x") for n in range(1, len(rows) + 1)]


def test_nothing_of_a_history_goes_for_a_message_that_had_expired() -> None:
    for size in (1, 5):
        rows = [(b"a", 0, ""), (b"a", 1, "3s"), (b"b", 2, "3s"), (b"a", 4, ""), (b"b", 4, ""), (b"b", 4, "")]
        rows += [(b"c", 5, "1s")]
        row_filter = RetentionFilter({"max_msgs_per_subject": 2, "allow_msg_ttl": True})
        # The first of b had not expired when the next came.
        assert filtered(expiring(rows), size, row_filter) == [1, 4, 5, 6, 7]
        assert row_filter.rows_left == 5
        assert filtered(expiring(rows), size, RetentionFilter({"max_msgs_per_subject": 2})) == [2, 4, 5, 6, 7]


@given(st.lists(st.lists(st.integers(1, 60), max_size=30, unique=True).map(sorted), max_size=4), st.integers(1, 7))
def test_partitions_are_merged_by_sequence_each_once(chains: list[list[int]], size: int) -> None:
    def batches(sequences: list[int]) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(sequences), size):
            yield batch_of([row(s) for s in sequences[at : at + size]])

    sources = [(1, lambda chain=chain: batches(chain)) for chain in chains]
    found = [s for batch in merge_rows(sources) for s in batch.column("sequence").to_pylist()]  # type: ignore[arg-type]
    assert found == sorted({s for chain in chains for s in chain})


def test_a_source_is_opened_when_its_rows_come() -> None:
    opened = []

    def source(first: int) -> Any:
        def rows() -> Iterator[pa.RecordBatch]:
            opened.append(first)
            yield batch_of([row(first), row(first + 1)])

        return first, rows

    rows = merge_rows([source(1), source(10)])
    next(rows)
    assert opened == [1]
    assert [batch.num_rows for batch in rows] == [2]


def test_the_guarded_configuration_reaches_no_producer_and_the_promoted_one_is_as_it_was() -> None:
    elsewhere = {"sources": [{"name": "other"}], "republish": {"src": ">", "dest": "r.>"}}
    kept = {"subjects": ["s.>"], "max_age": 10, "sealed": True, **elsewhere}
    config = {"name": "S", "num_replicas": 3, **kept, "placement": {"cluster": "c"}, "mirror": {"name": "up"}}
    promoted = planning.promoted_config(
        {**config, "metadata": {"_nats.level": "5", "own": "x", RESTORE_KEY: "old"}}, "T", 1
    )
    assert promoted == {"name": "T", "num_replicas": 1, **kept, "metadata": {"own": "x"}}
    guard = {"name": "T", "subjects": ["_floe.restore.T"], "num_replicas": 1}
    assert planning.guarded_config(promoted, "m") == {**guard, "metadata": {"own": "x", RESTORE_KEY: "m"}}
    assert [line.split()[0] for line in planning.unrestored_keys(config, "T")] == ["mirror", "placement"]
    assert "gives the stream the subject T" in [*planning.unrestored_keys({"mirror": {"name": "up"}}, "T")][-1]


def test_consumers_are_bounded_by_the_end_and_what_is_not_known_is_delivered_again() -> None:
    clean = CapturedConsumer({"durable_name": "clean", "metadata": {"_nats.ver": "1"}}, AT, 40, 45, 40, 45)
    ahead = CapturedConsumer({"durable_name": "ahead"}, AT, 60, 60, 55, 58)
    pending = CapturedConsumer({"durable_name": "open"}, AT, 30, 31, 20, 21, 9, 1)
    passing = CapturedConsumer({"name": "passing"}, AT)
    found, notes = form.restorable_consumers(CapturedConsumers(AT, 50, (clean, ahead, pending, passing)), 50)
    assert found == [
        CapturedConsumer({"durable_name": name, "metadata": {}}, AT, *delivered, *acknowledged)
        for name, delivered, acknowledged in (
            ("clean", (40, 45), (40, 45)),
            ("ahead", (60, 50), (55, 50)),
            ("open", (20, 21), (20, 21)),
        )
    ]
    assert ["1 ephemeral consumer " in notes[0], len(notes), "9 messages" in notes[2]] == [True, 3, True]


def test_a_push_consumer_is_quiet_until_the_stream_is_in_use_and_is_read_back_as_it_was() -> None:
    pushed = CapturedConsumer({"durable_name": "p", "deliver_subject": "a.b"}, AT)
    quiet = form.with_guard_subject(pushed, "S")
    assert quiet.config == {"durable_name": "p", "deliver_subject": "_floe.restore.S.a.b"}
    assert [form.without_guard_subject(each.config["deliver_subject"]) for each in (pushed, quiet)] == ["a.b", "a.b"]
    pull = CapturedConsumer({"durable_name": "q"}, AT)
    assert form.with_guard_subject(pull, "S") is pull
    captured = CapturedConsumers(AT, 1, (CapturedConsumer(dict(quiet.config), AT),))
    assert form.restorable_consumers(captured, 1)[0][0].config["deliver_subject"] == "a.b"


def test_a_source_is_known_by_its_messages() -> None:
    for source, key in (
        ({"name": "UP"}, "UP > >"),
        ({"name": "UP", "filter_subject": "up.a"}, "UP up.a >"),
        ({"name": "UP", "subject_transforms": [{"src": "a", "dest": "b.a"}, {"src": "c"}]}, "UP a\fc b.a\f>"),
        ({"name": "UP", "external": {"api": "$JS.leaf.API"}}, "UP:HASH > >"),
    ):
        assert re.sub(":[0-9A-Za-z]{8} ", ":HASH ", source_key(source)) == key
        text = f"NATS/1.0\r\nNats-Stream-Source: {source_key(source).replace(' ', ' 30 ', 1)} up.a ident\r\n\r\n"
        batch = batch_of([Message(4, 5, b"up.a", text.encode(), b""), row(7)])
        assert [*sourced_rows(batch)] == [(source_key(source), SourcedRow(4, 5, 30, "ident"))]
        old = batch_of([Message(4, 5, b"up.a", b"NATS/1.0\r\nNats-Stream-Source: UP 9\r\n\r\n", b"")])
        assert [*sourced_rows(old)] == [("UP", SourcedRow(4, 5, 9))]


def test_a_source_begins_behind_the_archived_ones_only_where_no_message_of_it_came_back() -> None:
    own = {"name": "OWN", "consumer": {"name": "C", "deliver_subject": "d"}}  # takes no start
    config = {"name": "S", "sources": [{"name": "HELD"}, {"name": "LOST", "opt_start_seq": 3}, {"name": "NONE"}, own]}
    sourced = {
        "HELD > >": SourcedRow(10, 1, 20),
        "LOST > >": SourcedRow(9, 1, 30),
        source_key(own): SourcedRow(8, 1, 5),
    }
    found = planning.with_source_starts(config, sourced, lambda row: row.sequence == 10)
    assert found["sources"] == [{"name": "HELD"}, {"name": "LOST", "opt_start_seq": 31}, {"name": "NONE"}, own]
    assert config["sources"][1] == {"name": "LOST", "opt_start_seq": 3}
    assert planning.with_source_starts({"name": "S"}, {}, lambda row: False) == {"name": "S"}


def test_each_command_for_a_plan_with_effects_elsewhere_permits_them_and_a_drills_has_none() -> None:
    request = RestoreRequest("us", "S", has_effects_elsewhere=True)
    assert "--allow-elsewhere" in repeat_command(request)
    assert "--allow-elsewhere" not in repeat_command(replace(request, has_effects_elsewhere=False))
    assert "--allow-elsewhere" not in repeat_command(replace(request, promote=False))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_digest_is_the_same_however_the_rows_are_batched(sizes: list[int]) -> None:
    headers = (b"NATS/1.0\r\n\r\n", None)
    rows = [Message(s, s * 7, b"s.%d" % (s % 3), headers[s % 2], b"x" * s) for s in range(1, sum(sizes) + 1)]
    digests, at = back.Digests(), 0
    for size in sizes:
        digests.add(batch_of(rows[at : at + size]))
        at += size
    digests.close()
    assert digests.blocks == [back.digest_block([batch_of(rows)])]
    rows[-1] = Message(at, at * 7 + 1, rows[-1].subject, rows[-1].headers, rows[-1].payload)
    assert digests.blocks != [back.digest_block([batch_of(rows)])]


def test_the_state_is_judged_by_what_the_configuration_lets_the_server_drop() -> None:
    expected = back.SentRows([back.digest_block([batch_of([row(3), row(5)])])], 2, 9, {})
    right = {"messages": 2, "first_seq": 3, "last_seq": 9, "num_deleted": 5}
    assert list(back.state_differences(expected, right)) == []
    for wrong in ({"last_seq": 8}, {"messages": 3}, {"first_seq": 2}, {"num_deleted": 4}):
        assert list(back.state_differences(expected, right | wrong)), wrong


async def test_messages_with_a_ttl_may_expire_before_the_state_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def info(*_: object) -> dict[str, Any]:
        return {"state": {"messages": 1, "first_seq": 3, "last_seq": 5}}

    monkeypatch.setattr(back, "stream_info_json", info)
    for config, is_same in (({}, False), ({"allow_msg_ttl": True}, True)):
        sent = back.SentRows([back.digest_block([batch_of([row(3), row(5)])])], 2, 5, config)
        found = await back.Comparer(None, "S", sent, lambda _: iter(()), print).run("state", [])  # type: ignore[arg-type]
        assert (found.dropped, found.is_same) == (1, is_same)


def part_of(first: int, last: int, *held: int) -> ReplayPart:
    whole = SequenceRange(first, last)
    return ReplayPart(Stretch(compaction.ref(first, last), whole), footer_of([row(s) for s in held]))


def test_max_age_cuts_only_where_no_message_may_outlive_it() -> None:
    for own, begin in (({}, 11), ({"allow_msg_ttl": True}, 0), ({"subject_delete_marker_ttl": 9}, 0)):
        parts = [part_of(1, 10, *range(1, 11)), part_of(11, 20, *range(11, 21))]
        assert planning.retained_from(parts, {"max_age": 5, **own}, 16, counts=True)[0] == begin
    later = footer_of([replace(row(10), timestamp_ns=12)])  # of another partition, and it ends at 10 too
    younger = replace(part_of(1, 10, 10), footer=later)
    assert planning.retained_from([part_of(1, 10, 10), younger], {"max_age": 5}, 16, counts=True)[0] == 1


def test_segments_that_end_before_the_archive_did_are_named() -> None:
    here, there = CHAIN, CHAIN.with_partition(1)
    assert list(planning.lost_end_lines({here: 400, there: 600}, {here: 400, there: 650})) == []
    assert "401..600 is missing" in next(planning.lost_end_lines({here: 600, there: 0}, {here: 400, there: 0}))


def test_what_an_older_server_does_not_know_is_a_difference_and_what_a_newer_adds_is_none() -> None:
    sent = {"sources": [{"name": "a"}], "allow_msg_ttl": True, "consumer_limits": {}, "metadata": {"own": "x"}}
    newer = {**sent, "metadata": {"own": "x", "_nats.level": "5", RESTORE_KEY: "m"}, "more": True}
    newer["sources"] = [{"name": "a", "more": 1}]
    assert list(back.config_differences(sent, newer)) == []
    older = {key: value for key, value in newer.items() if key != "allow_msg_ttl"}
    assert list(back.config_differences(sent, older)) == ["expected allow_msg_ttl True, found None"]
    for found in ([], None, [{"name": "b"}], [{"name": "a"}, {"name": "b"}]):
        assert len(list(back.config_differences(sent, {**newer, "sources": found}))) == 1


def test_a_digest_of_large_rows_ends_by_their_bytes() -> None:
    digests = back.Digests()
    for s in range(1, 21):
        digests.add(batch_of([Message(s, s, b"s", None, b"x" * (back.DIGEST_BYTES // 4))]))
    digests.close()
    assert [(block.first, block.last) for block in digests.blocks] == [(n, n + 3) for n in range(1, 21, 4)]


NO_JOIN = "and it is unknown if 0000 is the same stream before that: up to "
JOINED = "that it continues is the same stream only up to 12: up to 7 sequences of 13..19 not archived"
BY_RETENTION = "begins at 101, after retention of the archive, and "
CAPTURED = CapturedDeletions(AT, 200, 51, 200, ((60, 69),))
ALL_GONE = CapturedDeletions(AT, 200, 51, 200, ((51, 100),))


def test_what_is_missing_before_a_chain_is_lossy_where_the_stream_is_known_to_have_had_it() -> None:
    for incarnation, first, floor, least, join, gone, is_known, text in (
        (0, 101, 1, 1, None, None, True, "begins at 101, and the stream at 1: up to 100 sequences of 1..100 not"),
        (0, 2, 1, None, None, None, False, "the beginning of the stream is unknown: up to 1 sequence of 1..1 not"),
        (1, 13, 1, 5, None, None, True, NO_JOIN + "8"),
        (2, 20, 1, 1, 13, None, True, JOINED),
        (0, 101, 1, 101, None, None, None, None),
        (1, 13, 1, 1, 13, None, None, None),
        (1, 20, 1, 20, 13, None, None, None),
        (1, 1, 101, 1, None, None, True, BY_RETENTION + "the stream at 1: up to 100 sequences of 1..100 not"),
        (1, 1, 101, None, None, None, False, BY_RETENTION + "the beginning of the stream is unknown: up to 100"),
        (0, 1, 101, 101, None, None, None, None),
        (0, 101, 1, 51, None, CAPTURED, True, ": up to 40 sequences of 51..100 not archived"),  # the rest was deleted
        (0, 101, 1, 51, None, ALL_GONE, None, None),
        (0, 1, 101, 51, None, ALL_GONE, None, None),
    ):
        chain, deleted = CHAIN.with_incarnation(incarnation), RetentionFilter({}, gone).count_deleted
        found = list(planning.late_begins(chain, first, floor, least, join, deleted))
        assert [(each.is_known, text in each.line) for each in found] == [(is_known, True)] * (text is not None)


def test_nothing_is_missing_before_a_message_that_is_too_old_itself() -> None:
    own = {"max_age": 5, "allow_msg_ttl": True}
    for config, now_ns, gone in (({}, 99, 0), ({"max_age": 5}, 16, 11), ({"max_age": 5}, 26, 11), (own, 26, 0)):
        assert planning.dropped_below([part_of(11, 20, *range(10, 20))], config, now_ns, 0) == gone


def test_a_consumer_has_no_more_replicas_than_its_stream_allows() -> None:
    cases = ("limits", 1, 3, 1), ("limits", 5, 3, 3), ("limits", 1, 0, 0), ("interest", 5, 3, 5)
    for retention, replicas, had, gets in cases:
        consumer = CapturedConsumer({"durable_name": "c", "num_replicas": had}, AT)
        found, notes = form.with_replicas([consumer], {"num_replicas": replicas, "retention": retention})
        assert [each.config["num_replicas"] for each in found] == [gets]
        assert notes == [f"consumer c: had {had} replicas, and gets {gets} like its stream"] * (gets != had)


def plan_of(*parts: ReplayPart, **config: Any) -> RestorePlan:
    """Return the plan of a stream of 20 sequences with one part for each partition."""
    ranges = [ChainRange(CHAIN.with_partition(n), each.stretch.rows) for n, each in enumerate(parts)]
    chains = tuple(ReplayChain(of, (part,)) for of, part in zip(ranges, parts, strict=True))
    return RestorePlan(RestoreRequest("s", "f"), chains, CHAIN, 1, 20, 20, AT, {"name": "S", **config})


PUSHED = "deleted messages that come back may push out live ones: "


def test_the_plan_shows_what_limits_do_if_deletions_are_not_known() -> None:
    for limits, note in (
        ({"max_msgs": 15}, PUSHED + "up to 5 messages (max_msgs 15)"),
        ({"max_msgs_per_subject": 2}, PUSHED + "some of their subjects (max_msgs_per_subject 2)"),
        ({"max_msgs": 15, "discard": "new"}, "max_msgs 15 with discard new: nothing is dropped, and new messages"),
        ({"max_msgs": 20}, None),
    ):
        notes = planning.deviations(plan_of(part_of(1, 20, *range(1, 21)), **limits), 0, captured=None, skipped=())
        limit_notes = [each for each in notes if "max_msgs" in each and "drops the oldest" not in each]
        assert [each.startswith(note or "") for each in limit_notes] == [True] * (note is not None)


def test_a_partition_has_not_lost_what_another_one_has() -> None:
    for others, is_lost in ((range(11, 21), False), (range(12, 21), True)):
        plan = plan_of(part_of(1, 10, *range(1, 11)), part_of(1, 20, *others))
        assert any("are lost" in each for each in planning.deviations(plan, 0, captured=None, skipped=())) is is_lost


def test_the_plan_bounds_how_many_come_back_of_what_a_raised_limit_had_dropped() -> None:
    plan = plan_of(part_of(1, 20, *range(1, 21)))
    old = CapturedConfig(AT, 5, AT, {"max_msgs_per_subject": 1}, 5, 5, 1)
    for limit, last, most in ((5, 20, 10), (0, 20, 10), (-1, 21, 15), (1, 20, 0)):
        changed = replace(plan, configs=(old, CapturedConfig(AT, 20, AT, {"max_msgs_per_subject": limit}, 5, last, 6)))
        text = "max_msgs_per_subject 1 applied at least until sequence 5"
        found = [text in each and f"up to {most} messages" in each for each in planning.resurrected_lines(changed)]
        assert found == [True] * bool(most)
        assert [*planning.resurrected_lines(replace(changed, deletions=CapturedDeletions(AT, 20, 5, 20, ())))] == []


# Room

REQUEST = RestoreRequest("site", "S")
MANY = 10  # rows of the plan, of 100 bytes each


def planned(consumers: int = 0, deletions: CapturedDeletions | None = None, **config: Any) -> RestorePlan:
    rows = [message(n, b"x" * 99, subject=b"s", headers=None) for n in range(1, MANY + 1)]
    part = ReplayPart(Stretch(compaction.ref(1, MANY), SequenceRange(1, MANY)), footer_of(rows))
    several = (CapturedConsumer({"durable_name": "c"}, AT),) * consumers
    plan = replace(plan_of(part, **{"storage": "file", **config}), request=REQUEST, end=MANY, archived_end=MANY)
    return replace(plan, consumers=several, deletions=deletions)


GONE = CapturedDeletions(AT, MANY, 3, MANY, ((5, 5), (8, 9)))


def test_room_is_counted_as_the_server_does() -> None:
    for plan, stored in (
        (planned(), 10 * 130),
        (planned(storage="memory"), 10 * 116),
        (planned(deletions=GONE), 5 * 130),  # all below 3, and three later ones
        (planned(max_msgs=4), 4 * 130),
        (planned(max_bytes=700), 700),
        (planned(max_bytes=700, discard="new"), 10 * 130),
        (planned(max_msgs_per_subject=1), 0),
    ):
        assert plan.stored_bytes == stored


def test_deleted_sequences_of_a_range_are_those_that_a_filter_removes() -> None:
    gone = {1, 2, 5, 8, 9}
    row_filter = RetentionFilter({}, GONE)
    for first in range(1, 13):
        for last in range(first, 13):
            within = SequenceRange(first, last)
            assert row_filter.count_deleted(within) == len(gone & {*range(first, last + 1)}), within


def test_the_limit_of_the_account_that_is_in_the_way_is_named() -> None:
    for plan, limits, used, expected in (
        (planned(), {"max_storage": 1299}, {}, "account: expected max_file of at least 1.3 KiB, found 1.3 KiB"),
        (planned(), {"max_storage": 1300}, {}, None),
        (planned(), {"max_storage": 1300}, {"storage": 1}, "max_file of at least 1.3 KiB"),
        (planned(), {"max_storage": -1, "max_memory": 0}, {}, None),
        (planned(storage="memory"), {"max_memory": 0}, {}, "expected max_mem of at least"),
        (planned(2), {"max_consumers": 2}, {}, "stream S: expected max_consumers of at least 3, found 2"),
        (planned(2), {"max_consumers": 3}, {}, None),
        (planned(2, max_consumers=2), {"max_consumers": 5}, {}, "max_consumers of at least 3, found 2"),
    ):
        error = room_shortage(plan, {"limits": limits, **used}, 1)
        found = error and (error.code, error.exit_code, expected in error.message, "floe restore" in error.hint)
        assert found == (expected and ("E-RESTORE-ROOM", 78, True, True))
        ways = [word for word in ("--no-consumers", "--verify state") if error and word in error.hint]
        assert len(ways) == 2 * ("max_consumers of" in (expected or ""))
    assert room_shortage(planned(), {"limits": {"max_storage": 2000}}, 3) is not None
    assert room_shortage(planned(), {"limits": {"max_storage": 2000}}, 3, freed=700) is None


def test_more_consumers_than_a_server_accepts_by_default_are_noted() -> None:
    plan, many = planned(1), (planned(1).consumers[0],) * 1000
    for changes, version, is_noted in (
        ({"consumers": many}, (2, 15, 0), True),
        ({"consumers": many}, (2, 14, 9), False),
        ({"consumers": many[1:]}, (2, 15, 0), False),
        ({"consumers": many, "config": {**plan.config, "max_consumers": 2000}}, (2, 15, 0), False),
    ):
        server: Any = SimpleNamespace(server_version=version, is_clustered=True)
        notes = _server_notes(server, replace(plan, **changes), SimpleNamespace(format="logical"), {})  # type: ignore[arg-type]
        assert any("default_max_consumers" in note for note in notes) is is_noted


FULL = "restore failed: failed to store message sequence 9: write /s/2.blk: no space left on device"
TOO_MANY = 'restore failed: failed to add consumer "odd": maximum consumers limit reached (10026)'


def test_an_answer_of_a_server_without_room_is_named_so_and_a_cluster_may_find_resources_by_itself() -> None:
    for cause, is_clustered in (
        (ApiError(503, 10023, "insufficient resources"), True),
        (ApiError(500, 10062, "restore failed: unexpected content"), False),
    ):
        assert room_error(cause, REQUEST, "S", is_clustered=is_clustered) is None
    for number, description in (
        (10023, "insufficient resources"),
        (10062, FULL),
        (10062, TOO_MANY),
        (10047, "insufficient storage resources available"),
        (10027, "maximum number of streams reached"),
        (10113, "account requires a stream config to have max bytes set"),
    ):
        cause = ApiError(500, number, description)
        error, drill = (
            room_error(cause, replace(REQUEST, promote=promote), "S", is_clustered=False) for promote in (True, False)
        )
        assert (error.code, error.exit_code, description in error.message) == ("E-RESTORE-ROOM", 78, True)
        assert ("--no-consumers" in error.hint) is ("consumer" in description)
        assert [line.split()[1] for line in drill.hint.splitlines() if line.startswith("floe")] == ["drill"]


async def test_each_replica_is_waited_for_though_the_server_names_none_of_them_yet(monkeypatch: Any) -> None:
    """Wait: a server that has not started the stream's group yet reports a stream without replicas."""
    here, behind = ({"name": "b", "current": True}, {"name": "c", "current": True}), {"name": "c", "lag": 3}
    answers = [(), here[:1], (here[0], behind)]

    async def info(*_: object) -> dict[str, Any]:
        replicas = answers.pop(0) if answers else here
        return {"config": {"num_replicas": 3}, "cluster": {"leader": "a", "replicas": [*replicas]}}

    async def no_consumers(*_: object) -> list[Any]:
        return []

    def stopped() -> None:
        raise stopped_error(RestoreRequest("us-east", "S"))

    monkeypatch.setattr(read_back, "stream_info_json", info)
    monkeypatch.setattr(read_back, "list_consumers", no_consumers)
    assert await back.wait_replicated(None, "S", [], ManualClock(), back.AtRest(), print) == ["a", "b", "c"]  # type: ignore[arg-type]
    answers += [()] * 1000
    with pytest.raises(Unavailable, match="the restore was stopped"):
        await back.wait_replicated(None, "S", [], ManualClock(), back.AtRest(), stopped)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="found 2 missing or behind"):
        await back.wait_replicated(None, "S", [], ManualClock(), back.AtRest(), print)  # type: ignore[arg-type]
