"""The filter of a feed: the order of reasons, each of which is not given the messages left out before."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.archive.columns import Columns
from common.chain import Chain
from common.nats.headers import Provenance, split_provenance
from egress.builder import CODE_KEPT, CODE_LOOPED, CODE_SAMPLED_OUT, CODE_TOO_OLD, MessageBatch, count_left_out
from egress.loops import LoopMarkers
from egress.sampling.filters import FeedFilter
from egress.sampling.sampler import SampledBatch
from tests.support.headers import escape

SECOND = 1_000_000_000


def hop(site: str) -> bytes:
    return escape(None, Provenance(site, "FEED", 0, 0, 7, 1_700_000_000_000_000_001))


def batch(*messages: tuple[int, bytes | None]) -> Columns:
    """Return messages from sequence 1 on, each with its time (s) and its headers."""
    sequences, headers = [*range(1, len(messages) + 1)], [each for _, each in messages]
    times, payloads = [time * SECOND for time, _ in messages], [b"%d" % sequence for sequence in sequences]
    return Columns(sequences, times, [b"s"] * len(messages), headers, payloads)


class EveryOther:
    """A sampler that keeps every other message, and records the sequences given to it."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def fold(self, columns: Columns) -> SampledBatch:
        self.shown += columns.sequences
        kept = bytearray(place % 2 == 0 for place in range(len(columns.sequences)))
        return SampledBatch(kept, [f"k{s}" for s in columns.sequences], 0, 0, [])


def feed_filter(sampler: Any = None, *, relay: bool = True, keep: int = 100) -> FeedFilter:
    return FeedFilter("here", relay=relay, max_age_ns=keep * SECOND, sampler=sampler)


def test_reasons_are_asked_in_order_and_the_sampler_sees_only_what_the_others_pass() -> None:
    sampler = EveryOther()
    found = feed_filter(sampler).filter(
        batch((1_000, None), (899, hop("here")), (899, None), (1_000, hop("there")), (900, None), (1_000, None))
    )
    assert list(found.codes) == [CODE_KEPT, CODE_LOOPED, CODE_TOO_OLD, CODE_SAMPLED_OUT, CODE_KEPT, CODE_SAMPLED_OUT]
    assert (sampler.shown, found.kept.sequences, found.kept.sample_keys) == ([1, 4, 5, 6], [1, 5], ["k1", "k5"])
    counts = {reason.value: count for reason, count in count_left_out(found.codes).items()}
    assert counts == {"looped": 1, "too_old": 1, "sampled_out": 2}


def test_a_batch_that_is_left_out_as_a_whole_is_not_shown_to_the_sampler() -> None:
    sampler = EveryOther()
    sifter = feed_filter(sampler)
    found = sifter.filter(batch((1, hop("here")), (2, hop("here"))))
    assert (list(found.codes), found.kept.sequences, sampler.shown) == ([CODE_LOOPED, CODE_LOOPED], [], [])
    assert sifter.sampled is None


def test_hops_are_believed_on_relays_only() -> None:
    """Trust hops on relays only: elsewhere any publisher may write the header to hide a message."""
    assert feed_filter(relay=False).filter(batch((1, hop("here")))).kept.sequences == [1]


def test_a_header_that_only_mentions_floe_source_hides_nothing_and_a_hop_of_this_site_before_another_does() -> None:
    forged = b"NATS/1.0\r\nX: Floe-Source: here FEED 0000 0 7 1\r\n\r\n"
    behind = b"NATS/1.0\r\nA: b\r\nFloe-Source: here FEED 0000 0 7 1\r\n\r\n"
    assert feed_filter().filter(batch((1, forged), (1, behind))).kept.sequences == [1, 2]
    block = escape(hop("here"), Provenance("there", "FEED", 0, 0, 9, 1), relay=True)
    assert list(feed_filter().filter(batch((1, block))).codes) == [CODE_LOOPED]


def test_what_claims_to_have_come_round_passes_and_the_sampler_is_not_shown_it() -> None:
    """Pass it: the sampler must choose the same when the stream is read again, for any result of the comparison."""
    sampler, loop_markers = EveryOther(), LoopMarkers(Chain("here", "FEED"))
    sifter = FeedFilter("here", sampler=sampler, loop_markers=loop_markers)
    claiming = escape(hop("here").replace(b" 7 ", b" 1 "), Provenance("there", "FEED", 0, 0, 9, 1))
    found = sifter.filter(batch((1, None), (2, claiming), (3, hop("there")), (4, claiming), (5, None)))
    assert sampler.shown == [1, 3, 5]
    assert list(found.codes) == [CODE_KEPT, CODE_KEPT, CODE_SAMPLED_OUT, CODE_KEPT, CODE_KEPT]
    assert (found.kept.sequences, found.kept.sample_keys) == ([1, 2, 4, 5], ["k1", None, None, "k5"])
    everything = batch((6, claiming), (7, claiming))
    everything.sequences[:] = [6, 7]
    assert (sifter.filter(everything).kept.sequences, sampler.shown) == ([6, 7], [1, 3, 5])


def test_source_time_counts_as_seen_and_the_answer_is_if_that_changes_anything() -> None:
    sifter = feed_filter()
    sifter.filter(batch((500, None)))
    assert not sifter.observe_source_time(400 * SECOND)
    assert not sifter.observe_source_time(600 * SECOND)
    assert sifter.observe_source_time(701 * SECOND)
    assert list(sifter.filter(batch((600, None), (601, None))).codes) == [CODE_TOO_OLD, CODE_KEPT]
    assert not feed_filter(keep=0).observe_source_time(701 * SECOND)


TIMES = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@given(st.lists(TIMES, max_size=5), st.integers(1, 20), st.integers(0, 60))
@settings(max_examples=150)
def test_too_old_agrees_with_checking_every_message(batches: list[list[int]], keep: int, seen: int) -> None:
    sifter, newest = feed_filter(keep=keep), seen
    sifter.observe_source_time(seen * SECOND)
    for times in batches:
        expected = []
        for time in times:
            newest = max(newest, time)
            expected.append(CODE_TOO_OLD if time < newest - keep else CODE_KEPT)
        assert list(sifter.filter(batch(*((time, None) for time in times))).codes) == expected


@given(st.lists(st.sampled_from([CODE_KEPT, CODE_LOOPED, CODE_TOO_OLD, CODE_SAMPLED_OUT]), min_size=1), st.data())
@settings(max_examples=100)
def test_a_part_holds_what_was_kept_inside_it(codes: list[int], data: Any) -> None:
    columns, places = batch(*((1, None) for _ in codes)), [place for place, code in enumerate(codes) if not code]
    lists = columns.sequences, columns.timestamps_ns, columns.subjects, columns.headers, columns.payloads
    kept = [[values[place] for place in places] for values in lists]
    whole = MessageBatch(columns, bytes(codes), Columns(*kept, [str(place) for place in places]))
    first = data.draw(st.integers(0, len(codes)))
    last = data.draw(st.integers(first, len(codes)))
    part = whole.part(first, last)
    assert (list(part.codes), len(part)) == (codes[first:last], last - first)
    assert part.kept.sequences == [p + 1 for p in range(first, last) if not codes[p]]
    assert part.kept.sample_keys == [str(p) for p in range(first, last) if not codes[p]]
    assert part.kept.payloads == [b"%d" % (p + 1) for p in range(first, last) if not codes[p]]
    for rows in range(1, len(whole.kept.sequences) + 1):
        assert codes[: whole.examined_until(rows)].count(CODE_KEPT) == rows
        assert codes[whole.examined_until(rows) - 1] == CODE_KEPT


def replayed(site: str, *more: bytes) -> bytes:
    """Return the headers of a message that a replay put back into the feed's own source."""
    return b"\r\n".join((b"NATS/1.0", hop_line(site), b"Floe-Replay: 3f0c9a1be27d4455", *more, b"", b""))


def hop_line(site: str) -> bytes:
    return Provenance(site, "FEED", 0, 0, 7, 1).line()


def test_what_a_replay_brought_back_is_archived() -> None:
    forged = escape(b"NATS/1.0\r\nFloe-Replay: 3f0c9a1be27d4455\r\n\r\n", Provenance("here", "FEED", 0, 0, 7, 1))
    elsewhere = replayed("there", hop_line("here"))
    found = feed_filter().filter(batch((1, replayed("here")), (2, forged), (3, elsewhere), (4, hop("here"))))
    assert list(found.codes or b"") == [CODE_KEPT, CODE_LOOPED, CODE_LOOPED, CODE_LOOPED]


def test_the_mark_of_a_replay_ends_with_its_hop() -> None:
    once_more = escape(replayed("here", b"A: 1"), Provenance("here", "FEED", 1, 0, 7, 1), relay=True)
    assert b"Floe-Replay" not in once_more
    assert split_provenance(once_more)[1] == b"NATS/1.0\r\nA: 1\r\n\r\n"
    assert split_provenance(replayed("here"))[1] is None
