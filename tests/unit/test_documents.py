"""The small objects beside the segments: created once, and validated when read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.archive import documents
from common.archive.catalog import chain_ends
from common.archive.documents import ChainDocument, ChainStart, ChainStore, CompactionRun, StreamDocument, run_of
from common.archive.keys import CaptureName, Layout
from common.chain import Chain
from common.documents import MAX_DEPTH, check_depth, is_too_deep
from common.errors import DataError, OutcomeUnknown, Unavailable
from common.objects.local import LocalObjects
from common.objects.port import ConditionalPutRefused
from common.sequences import MAX_SEQUENCE, SequenceRange
from tests.support.basics import raises_code
from tests.support.stores import ClaimsInMemory, CountingObjects, FaultyStore, answering, raising, refusing_conditions

CHAIN = Chain("us-east", "NODES", 1, 2)
LAYOUT = Layout("data")
STREAM = StreamDocument(
    {"name": "NODES", "subjects": ["nodes.>"], "max_age": 86_400_000_000_000, "metadata": {"a": "ä"}},
    "2026-11-20T10:00:00.123456789Z",
    {0: 100, 1: 0, 1023: MAX_SEQUENCE},
)

DOCUMENT = ChainDocument(("nodes.a.>", "nodes.b.>"), 4, 17)


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture
def chains(objects: LocalObjects) -> ChainStore:
    return ChainStore(objects, LAYOUT)


def test_what_an_incarnation_continues_is_read_again_and_passed_over_by_older_readers(chains: ChainStore) -> None:
    assert (chains.read_stream(CHAIN), chains.read_chain(CHAIN)) == (None, None)
    assert (chains.tail_etags(), chains.chains()) == ({}, [])
    for previous in (None, {}):  # the first, and one after an incarnation without partitions
        assert StreamDocument.from_json(StreamDocument({}, "", previous).to_json()).previous == previous
    made = StreamDocument({}, "", {0: 9}, (ChainStart((), 7),), continues_from={0: 7}, continued=3, stream_first=2)
    assert StreamDocument.from_json(made.to_json()) == made
    old = json.loads(made.to_json())
    assert (old["continues_from"], old["continued"], old["stream_first"]) == ({"0": 7}, 3, 2)
    assert not {"continues_from", "continued", "stream_first"} & json.loads(STREAM.to_json()).keys()
    cut = StreamDocument({}, "", {0: 9}, (ChainStart((), 10),), continues=True)
    assert (made.join_sequences, STREAM.join_sequences, cut.join_sequences) == ({0: 7}, {}, {0: 10})


def test_known_tails_are_read_back_and_count_as_none_where_they_are_invalid(chains: ChainStore) -> None:
    assert chains.read_known_tails("FLEET") == {}
    chains.write_known_tails("FLEET", {CHAIN: documents.KnownTail('"e-1"', 7)})
    assert chains.read_known_tails("FLEET") == {CHAIN: documents.KnownTail('"e-1"', 7)}
    for tails in ('{"x":["e",1]}', f'{{"{CHAIN}":["e",-1]}}', f'{{"{CHAIN}":["e"]}}', f'{{"{CHAIN}":[1,1]}}'):
        chains.objects.put(LAYOUT.ingress_tails("FLEET"), f'{{"format_version":1,"tails":{tails}}}'.encode())
        assert chains.read_known_tails("FLEET") == {}


def chained(chains: ChainStore, number: int, firsts: list[int], **keys: Any) -> None:
    """Make an incarnation with partitions that begin at `firsts` and have the subjects in `cut`."""
    cut = keys.pop("cut", [f"{n}.>" for n in range(len(firsts))])
    own = tuple(ChainDocument((text,), len(firsts), first) for text, first in zip(cut, firsts, strict=True))
    chain = Chain("site", "F", number)
    chains.create_stream(chain, StreamDocument({}, "", {} if number else None, ChainStart.of(own), **keys))
    for part, document in enumerate(own):
        chains.create_chain(Chain("site", "F", number, part), document)


def ends(chains: ChainStore, number: int) -> dict[tuple[int, int], int]:
    return {(c.incarnation, c.partition): end for c, end in chain_ends(chains, Chain("site", "F", number)).items()}


def test_a_history_follows_what_was_compared_and_ends_where_nothing_was(chains: ChainStore) -> None:
    chained(chains, 0, [1])
    chained(chains, 1, [31], continues=True)
    chained(chains, 2, [25], continues_from={0: 25})  # rolled back after the cut, before any of it was archived
    chained(chains, 3, [1])  # recreated
    chained(chains, 4, [40], continues_from={0: 40}, continued=2)
    assert ends(chains, 1) == {(1, 0): MAX_SEQUENCE, (0, 0): 30}
    assert ends(chains, 2) == {(2, 0): MAX_SEQUENCE, (1, 0): 24, (0, 0): 24}
    assert ends(chains, 3) == {(3, 0): MAX_SEQUENCE}
    assert ends(chains, 4) == {(4, 0): MAX_SEQUENCE, (2, 0): 39, (1, 0): 24, (0, 0): 24}
    for number, former in ((5, 5), (6, 7)):  # itself, a later one
        chained(chains, number, [50], continues_from={0: 50}, continued=former)
        assert ends(chains, number) == {(number, 0): MAX_SEQUENCE}


def test_partitions_continue_each_from_its_own_sequence_unless_they_were_cut_otherwise(chains: ChainStore) -> None:
    chained(chains, 0, [1, 1])
    chained(chains, 1, [13, 20], continues_from={0: 13, 1: 20})
    chained(chains, 2, [30, 33, 30], continues_from={0: 30, 1: 33, 2: 30})
    assert ends(chains, 1) == {(1, 0): MAX_SEQUENCE, (1, 1): MAX_SEQUENCE, (0, 0): 12, (0, 1): 19}
    assert ends(chains, 2) == {(2, n): MAX_SEQUENCE for n in range(3)}


def test_the_second_writer_gets_what_the_first_made_also_if_the_store_ignores_the_condition(
    chains: ChainStore, objects: LocalObjects
) -> None:
    chains.create_chain(CHAIN, DOCUMENT)
    chains.create_stream(CHAIN, STREAM)
    assert chains.create_chain(CHAIN, ChainDocument((), 1, 1)) == DOCUMENT
    assert chains.create_stream(CHAIN, StreamDocument({}, "later", None)) == STREAM
    chain = Chain("us-east", "RACED")

    def overtaken(real: Any, key: str, body: bytes, **options: Any) -> Any:
        assert real(key, DOCUMENT.to_json())
        return real(key, body, **options)

    store = ChainStore(FaultyStore(objects).on("put_if_absent", overtaken), LAYOUT)
    assert store.create_chain(chain, ChainDocument((), 1, 5)) == DOCUMENT
    careless = FaultyStore(objects).on("put_if_absent", lambda _, key, body, **__: objects.put(key, body))
    assert ChainStore(careless, LAYOUT).create_chain(CHAIN, ChainDocument((), 1, 1)) == DOCUMENT


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("was_done", [True, False])
def test_an_unknown_outcome_is_settled_by_reading(objects: LocalObjects, was_done: bool, is_claimed: bool) -> None:
    claims, lost = ClaimsInMemory(), raising(OutcomeUnknown("answer lost"), after=was_done)
    if is_claimed:
        store = ChainStore(refusing_conditions(objects).on("put", lost), LAYOUT, claims)
    else:
        store = ChainStore(FaultyStore(objects).on("put_if_absent", lost), LAYOUT)
    if was_done:
        assert store.create_chain(CHAIN, DOCUMENT) == DOCUMENT
    else:
        with pytest.raises(Unavailable, match="not found after it was put"):
            store.create_chain(CHAIN, DOCUMENT)
        assert [body for body, _ in claims.held.values()] == [DOCUMENT.to_json()] * is_claimed


# Invalid documents


def corrupt(document: ChainDocument | StreamDocument, **fields: Any) -> bytes:
    return json.dumps({n: v for n, v in {**json.loads(document.to_json()), **fields}.items() if v != "absent"}).encode()


def nested(levels: int) -> bytes:
    """Return a stream document with a configuration of so many levels; the document itself is one more."""
    return corrupt(STREAM, config="here").replace(b'"here"', b'{"a":' * levels + b'"[{"' + b"}" * levels)


NO_SEQUENCES = (0, -1, MAX_SEQUENCE + 1, 10**30, "1", 1.5, True, None, "absent")
BAD_STREAM_FIELDS: tuple[dict[str, Any], ...] = (
    {"config": []},
    {"config": None},
    {"created": 1},
    *({"previous": each} for each in ([1], {"0": -1}, {"0": MAX_SEQUENCE + 1}, "absent")),
    *({"previous": {each: 1}} for each in ("x", "٣", "-1", "1024")),
)


BAD_CHAINS = [
    *(b"", b"\xff", b"null", b"[]", b"<html>", b"[" * 100_000, b'{"a":' * 100_000, DOCUMENT.to_json() + b"x"),
    b" " * (1024 * 1024) + DOCUMENT.to_json(),
    *(corrupt(DOCUMENT, format_version=each) for each in (2, "absent")),
    *(corrupt(DOCUMENT, first=each) for each in NO_SEQUENCES),
    *(corrupt(DOCUMENT, partitions=each) for each in (0, 65537)),
    *(corrupt(DOCUMENT, filters=each) for each in ("nodes.>", [1])),
]


def refusal(read: Callable[[Chain], object]) -> DataError:
    with raises_code(DataError, "E-STATE-JSON") as caught:
        read(CHAIN)
    return caught.value


@pytest.mark.parametrize("raw", BAD_CHAINS, ids=lambda raw: repr(raw[:60]))
def test_a_corrupt_chain_document_is_never_acted_on(objects: LocalObjects, chains: ChainStore, raw: bytes) -> None:
    objects.put(LAYOUT.chain_document(CHAIN), raw)
    assert refusal(chains.read_chain).message.startswith(f"{LAYOUT.chain_document(CHAIN)}: ")
    refusal(lambda chain: chains.create_chain(chain, DOCUMENT))


def test_a_corrupt_stream_document_or_floor_is_never_acted_on(objects: LocalObjects, chains: ChainStore) -> None:
    for raw in (b"", *(corrupt(STREAM, **each) for each in BAD_STREAM_FIELDS), nested(MAX_DEPTH), nested(5000)):
        objects.put(LAYOUT.stream_document(CHAIN), raw)
        refusal(chains.read_stream)
    objects.put(LAYOUT.stream_document(CHAIN), nested(MAX_DEPTH - 1))
    assert chains.read_stream(CHAIN) is not None
    objects.put(LAYOUT.floor_document(CHAIN), b"{}")
    refusal(lambda chain: chains.raise_floor(chain, 5))


NESTINGS = [
    (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, False),
    (b"[" + b'{"a":[{}]},' * 10_000 + b"1]", False),
    (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), True),
    (b'[{"a":' * 51 + b"1" + b"}]" * 51, True),
    (b"[" * (MAX_DEPTH + 1) + b'"', True),
    (b"[]" * 5000 + b"]" * 5000 + b"[" * MAX_DEPTH, False),
]


@pytest.mark.parametrize(
    ("raw", "is_deep"), NESTINGS, ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else ""
)
def test_levels_are_those_that_are_open_at_once_and_not_brackets_in_texts(raw: bytes, is_deep: bool) -> None:
    assert is_too_deep(raw) == is_deep
    for text in (r"[{" * 5000, r"\"[{" * 5000, "\\\\"):
        check_depth(json.dumps({text: [text, text]}).encode())
        with pytest.raises(ValueError, match="nested too deeply"):
            check_depth(json.dumps({text: text}).encode() + b"[" * (MAX_DEPTH + 1))


def test_no_more_of_a_document_is_read_or_written_than_its_greatest_size(tmp_path: Path) -> None:
    objects = CountingObjects(tmp_path / "store")
    objects.put(LAYOUT.chain_document(CHAIN), b" " * (5 * 1024 * 1024))
    chains = ChainStore(objects, LAYOUT)
    refusal(chains.read_chain)
    assert objects.read == 1024 * 1024 + 1
    with pytest.raises(DataError, match="expected at most"):
        chains.create_stream(CHAIN, StreamDocument({"x": "y" * 2_000_000}, "", None))
    assert chains.read_stream(CHAIN) is None


OUTSIDE_RANGES = [
    lambda: ChainDocument((), 0, 1),
    lambda: ChainDocument((), 1, 0),
    lambda: StreamDocument({}, "", {-1: 1}),
    lambda: StreamDocument({}, "", {0: MAX_SEQUENCE + 1}),
    lambda: StreamDocument({}, "", None, continues_from={0: 0}),
    lambda: StreamDocument({}, "", None, continues_from={-1: 1}),
    lambda: StreamDocument({}, "", None, continued=10_000),
    lambda: StreamDocument({}, "", None, stream_first=0),
]


@pytest.mark.parametrize("make", OUTSIDE_RANGES)
def test_values_outside_their_range_are_refused_before_they_are_written(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


# Floor


def test_the_floor_rises_and_never_falls_whoever_raises_it_in_between(
    objects: LocalObjects, chains: ChainStore
) -> None:
    for first, floor in ((10, 10), (5, 10), (20, 20), (20, 20)):
        chains.raise_floor(CHAIN, first)
        assert chains.read_floor(CHAIN) == floor
    for wrong in (0, -1, MAX_SEQUENCE + 1):
        with pytest.raises(ValueError, match="expected 1 to"):
            chains.raise_floor(CHAIN, wrong)

    def overtaken(real: Any, *args: Any) -> Any:
        chains.raise_floor(CHAIN, 50)
        return real(*args)

    faulty = FaultyStore(objects).on("put_if_match", overtaken, nth=1)
    ChainStore(faulty, LAYOUT).raise_floor(CHAIN, 30)
    assert (chains.read_floor(CHAIN), faulty.calls["put_if_match"]) == (50, 1)
    always = FaultyStore(objects).on("put_if_match", answering(False))
    with pytest.raises(Unavailable, match="lost to other writers"):
        ChainStore(always, LAYOUT).raise_floor(CHAIN, 70)


# Tails and lists of chains


def test_a_tail_holds_the_end_changes_its_etag_when_it_moves_and_is_none_if_corrupt(
    objects: LocalObjects, chains: ChainStore
) -> None:
    chains.write_tail(CHAIN, 100)
    objects.put(f"{LAYOUT.tails_prefix()}us-east/NODES/notes.txt", b"")  # a foreign key
    before = chains.tail_etags()
    assert (list(before), chains.tail_etags()) == ([CHAIN], before)
    chains.write_tail(CHAIN, 200)
    assert chains.read_tail(CHAIN) == 200
    assert chains.tail_etags() != before
    for raw in (b"", b"x", b'{"end":-1,"format_version":1}', b" " * 2_000_000):
        objects.put(LAYOUT.tail(CHAIN), raw)
        assert chains.read_tail(CHAIN) is None
        chains.write_tail(CHAIN, 7)
        assert chains.read_tail(CHAIN) == 7


def test_chains_are_found_by_their_documents_behind_thousands_of_captures_without_listing_those(
    objects: LocalObjects, chains: ChainStore, tmp_path: Path
) -> None:
    made = [Chain("a", "X"), Chain("a", "X", 1), Chain("a", "Y", 0, 3), Chain("a", "XX"), Chain("b", "X")]
    for chain in made:
        chains.create_chain(chain, DOCUMENT)
        chains.create_stream(chain, STREAM)
        chains.raise_floor(chain, 1)
    objects.put("data/_floe/site=a/feed=X/notes/chain.json", b"")
    [first, *others] = [LAYOUT.capture(CaptureName(made[0], "config", end, "0" * 16)) for end in range(2500)]
    objects.put(first, b"")
    for key in others:
        (tmp_path / "store" / key).touch()
    store = FaultyStore(objects)
    found = ChainStore(store, LAYOUT)  # type: ignore[arg-type]
    assert (found.chains(), store.calls["list"], found.chains("a")) == (sorted(made), 2, sorted(made[:4]))
    assert (found.chains("a", "X"), found.chains(feed="X"), found.chains("c")) == (made[:2], [*made[:2], made[4]], [])


# Runs of compaction


def test_the_last_run_and_success_of_a_chain_count_whichever_chains_they_were_for_and_a_corrupt_one_is_none(
    chains: ChainStore,
) -> None:
    runs = {
        (None, None): CompactionRun(1000.0, 5.0, 0, 1000.0),
        (CHAIN.site, None): CompactionRun(3000.0, 5.5, 3, 2000.0),
        (CHAIN.site, "OTHER"): CompactionRun(9000.0, 5.0, 0, 9000.0),
        ("eu-west", None): CompactionRun(9000.0, 5.0, 75),
    }
    for (site, feed), run in runs.items():
        chains.write_run(site, feed, run)
    assert (chains.runs(), run_of(runs, CHAIN)) == (runs, CompactionRun(3000.0, 5.5, 3, 2000.0))
    assert run_of(runs, Chain("eu-west", "NODES")) == CompactionRun(9000.0, 5.0, 75, 1000.0)
    assert run_of({("eu-west", None): CompactionRun(9000.0, 5.0, 75)}, CHAIN) is None
    wrongs = {"format_version": 2, "ended": 1e300, "seconds": -1, "code": 256, "succeeded": 1e12}
    good = {"format_version": 1, "ended": 1, "seconds": 1, "code": 0}
    for text in ("not json", *(json.dumps(good | {key: wrong}) for key, wrong in wrongs.items())):
        chains.objects.put(LAYOUT.run(None, None), text.encode())
        assert chains.read_run(None, None) is None
        assert (None, None) not in chains.runs()
    chains.objects.put(LAYOUT.run(None, None), json.dumps(good).encode())
    assert chains.read_run(None, None) is not None


# Stores that refuse conditions


def test_a_writer_paused_before_its_put_puts_what_was_claimed_first(objects: LocalObjects) -> None:
    claims, other = ClaimsInMemory(), ChainDocument((), 1, 5)

    def overtaken(real: Any, *args: Any, **options: Any) -> Any:
        assert ChainStore(refusing_conditions(objects), LAYOUT, claims).create_chain(CHAIN, other) == DOCUMENT
        return real(*args, **options)

    store = ChainStore(refusing_conditions(objects).on("put", overtaken), LAYOUT, claims)
    assert store.create_chain(CHAIN, DOCUMENT) == DOCUMENT


def test_what_a_writer_claimed_before_it_died_is_put_by_the_next_and_what_is_there_wins_over_a_claim_that_was_lost(
    objects: LocalObjects,
) -> None:
    claims = ClaimsInMemory()
    dying = ChainStore(refusing_conditions(objects).on("put", raising(Unavailable("died"))), LAYOUT, claims)
    with pytest.raises(Unavailable):
        dying.create_chain(CHAIN, DOCUMENT)
    store = ChainStore(refusing_conditions(objects), LAYOUT, claims)
    assert store.create_chain(CHAIN, ChainDocument((), 1, 5)) == DOCUMENT
    chain = CHAIN.next_incarnation()

    def lost(real: Any, key: str, body: bytes) -> Any:
        ChainStore(objects, LAYOUT).create_chain(chain, DOCUMENT)  # by a writer that lost its claim with the bucket
        return real(key, body)

    late = ChainStore(refusing_conditions(objects), LAYOUT, FaultyStore(claims).on("claim", lost))  # type: ignore[arg-type]
    assert (late.create_chain(chain, ChainDocument((), 1, 5)), claims.held) == (DOCUMENT, {})


def test_what_has_no_arbiter_is_refused_and_changes_nothing_but_a_gap_is_accepted(objects: LocalObjects) -> None:
    store = ChainStore(refusing_conditions(objects), LAYOUT)
    for work in (lambda: store.create_chain(CHAIN, DOCUMENT), lambda: store.raise_floor(CHAIN, 7)):
        with raises_code(ConditionalPutRefused, "E-STORE-CONDITIONS"):
            work()
    objects.put(LAYOUT.floor_document(CHAIN), b'{"format_version":1,"first":3}')
    with pytest.raises(ConditionalPutRefused):
        store.raise_floor(CHAIN, 7)
    assert (store.read_floor(CHAIN), store.read_chain(CHAIN)) == (3, None)
    # Its name holds its range; accepting it again only leaves another note.
    gap = documents.AcceptedGap(SequenceRange(3, 9), "gone", "me", "2026-11-20T10:00:00Z")
    assert store.accept_gap(CHAIN, gap) == store.accept_gap(CHAIN, documents.AcceptedGap(gap.range, "again")) == gap
    assert store.gaps(CHAIN) == [gap]


# The chain: its parts, its text, its order


def test_a_chain_is_written_with_four_parts_and_read_back() -> None:
    chain = Chain("us-east", "NODES", 3, 12)
    assert (str(chain), Chain.parse(str(chain))) == ("us-east/NODES/0003/12", chain)
    assert Chain.parse("us-east/NODES") == Chain("us-east", "NODES", 0, 0)
    assert chain.next_incarnation() == Chain("us-east", "NODES", 4, 12)
    assert chain.log_context() == {"site": "us-east", "feed": "NODES", "incarnation": 3, "partition": 12}


@pytest.mark.parametrize("text", ["", "us-east", "a/b/0/0/0", "a/b/x", "a/b/-1", "a//0/0", "/b"])
def test_text_that_is_not_a_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid"):
        Chain.parse(text)


def test_parts_are_what_every_key_header_and_stream_can_carry() -> None:
    for site in ("", "-a", "_a", "a.b", "a/b", "a b", "a" * 64, "ä", ".."):
        with pytest.raises(ValueError, match="site"):
            Chain(site, "F")
    for feed in ("", "a.b", "a b", "a*", "a>", "a/b", "a\\b", "a\n", "a" * 256):
        with pytest.raises(ValueError, match="feed"):
            Chain("s", feed)
    for incarnation, partition in ((-1, 0), (10000, 0), (0, -1), (0, 65536)):
        with pytest.raises(ValueError, match="expected 0 to"):
            Chain("s", "F", incarnation, partition)
