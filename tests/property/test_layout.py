"""Keys, formatted and parsed, and listings from a position."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.archive.keys import CAPTURES, CaptureName, Layout, SegmentName, StateName, decode, encode
from common.chain import MAX_INCARNATION, MAX_PARTITION, Chain
from common.sequences import MAX_SEQUENCE, SequenceRange

sites = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)
feeds = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda text: not any(c.isspace() or c in ".*>/\\" or ord(c) < 0x20 or ord(c) == 0x7F for c in text)
)
chains = st.builds(Chain, sites, feeds, st.integers(0, MAX_INCARNATION), st.integers(0, MAX_PARTITION))
sequences = st.integers(1, MAX_SEQUENCE) | st.integers(1, 30)
ranges = st.tuples(sequences, sequences).map(lambda pair: SequenceRange(min(pair), max(pair)))
digests = st.text("0123456789abcdef", min_size=16, max_size=16)
names = st.builds(SegmentName, chains, st.integers(0, 9), ranges, digests)
states = st.builds(StateName, chains, sequences, digests)
layouts = st.sampled_from([Layout(), Layout("data"), Layout("a/b-c")])


@given(layouts, names)
def test_a_segment_key_is_read_back_and_holds_nothing_that_a_store_or_a_path_could_misread(
    layout: Layout, name: SegmentName
) -> None:
    key = layout.segment(name)
    assert layout.parse_segment(key) == name
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key
    assert not {"", ".", ".."} & set(key.split("/"))


@given(layouts, states, st.text(min_size=1, max_size=80))
def test_keys_beside_the_segments_are_read_back_and_differ(layout: Layout, state: StateName, name: str) -> None:
    chain = state.chain
    document, tail, key = layout.chain_document(chain), layout.tail(chain), layout.state(state)
    found = layout.parse_chain_document(document), layout.parse_tail(tail), layout.parse_state(key)
    assert found == (chain, chain, state)
    assert key.startswith(layout.states_prefix(chain))
    for other in (tail, key, layout.floor_document(chain), layout.stream_document(chain)):
        assert (layout.parse_chain_document(other), layout.parse_segment(other)) == (None, None)
    assert layout.parse_tail(key) is layout.chain_of_key(tail) is None
    assert layout.chain_of_key(document) == chain
    assert any(document.startswith(place) for place in layout.chain_prefixes(chain))
    assert not layout.is_foreign(document)
    assert not layout.can_quarantine(document)
    assert layout.is_foreign(f"{document}x")
    assert layout.is_foreign(document.replace(".json", ".txt"))
    assert layout.parse_ingress_positions(layout.ingress_positions(name)) == name
    assert layout.parse_ingress_positions(layout.ingress_clock(name)) is None
    assert layout.parse_heartbeat(layout.heartbeat(chain.site, name)) == (chain.site, name)
    for chosen in ((None, None), (chain.site, None), (chain.site, chain.feed)):
        assert layout.parse_run(layout.run(*chosen)) == chosen
        assert layout.run(*chosen).startswith(layout.runs_prefix())


@given(names, states, st.booleans(), st.data())
def test_a_key_that_was_changed_anywhere_is_foreign_or_means_something_else(
    segment: SegmentName, state: StateName, is_state: bool, data: st.DataObject
) -> None:
    layout = Layout("data")
    name: SegmentName | StateName = state if is_state else segment
    key = layout.state(state) if is_state else layout.segment(segment)
    at = data.draw(st.integers(0, len(key) - 1))
    changed = key[:at] + data.draw(st.sampled_from(["", *"/%x0٣.\n", key[at] * 2])) + key[at + 1 :]
    assume(changed != key)
    parsed = layout.parse_state(changed) if is_state else layout.parse_segment(changed)
    again = None if parsed is None else layout.state(parsed) if is_state else layout.segment(parsed)
    assert parsed is None or (parsed != name and again == changed)


@given(
    chains,
    st.lists(st.tuples(sequences, digests), min_size=2, max_size=10, unique=True),
    st.lists(ranges, min_size=2, max_size=10, unique=True),
)
def test_keys_of_snapshots_sort_by_position_and_those_of_a_level_by_where_the_segments_end(
    chain: Chain, found: list[tuple[int, str]], spans: list[SequenceRange]
) -> None:
    keys = [Layout().state(StateName(chain, *each)) for each in found]
    assert sorted(keys) == [Layout().state(StateName(chain, *each)) for each in sorted(found)]
    by_end = sorted(spans, key=lambda r: (r.last, r.first))
    keys = [Layout().segment(SegmentName(chain, 0, r, "0" * 16)) for r in spans]
    assert sorted(keys) == [Layout().segment(SegmentName(chain, 0, r, "0" * 16)) for r in by_end]


def test_a_snapshot_key_is_not_made_of_parts_outside_their_range() -> None:
    digest = "0" * 15
    for position, wrong in ((0, f"{digest}0"), (MAX_SEQUENCE + 1, f"{digest}0"), (1, digest), (1, f"{digest}g")):
        with pytest.raises(ValueError, match="expected"):
            Layout().state(StateName(Chain("site", "FEED"), position, wrong))


@given(layouts, names, states, st.text(min_size=1, max_size=40))
def test_nothing_formatted_is_foreign_and_only_segments_and_tombstones_may_be_quarantined(
    layout: Layout, name: SegmentName, state: StateName, target: str
) -> None:
    chain, bounds = name.chain, f"{name.coverage.last:020d}-{name.coverage.first:020d}"
    documents = [
        *(layout.stream_document(chain), layout.chain_document(chain), layout.floor_document(chain)),
        layout.gap(layout.gaps_prefix(chain), name.coverage),
        layout.gap(layout.skipped_prefix(target, chain), name.coverage),
        *(layout.capture(CaptureName(chain, kind, state.position, state.digest)) for kind in CAPTURES),
        *(layout.state(state), layout.tail(chain), layout.heartbeat(chain.site, "host.1"), layout.clock()),
        *(
            layout.ingress_clock(target),
            layout.ingress_tails(target),
            layout.start_document(target, chain.site, chain.feed),
        ),
        *(layout.run(None, None), layout.run(chain.site, None), layout.run(chain.site, chain.feed)),
        f"{layout.reported_prefix(chain)}{name.digest}.json",
        f"{layout.documents_prefix(chain.site, chain.feed)}probe/wrong-checksum",
        *(layout.quarantine_key(layout.segment(name), name.digest), layout.compared(chain, target)),
        *(layout.audit_record(state.position % 10**18, site, name.digest) for site in ("", chain.site)),
    ]
    assert not any(key.startswith(layout.segments_prefix(chain, 0)) for key in documents)
    assert all("/_floe/" in f"/{key}" for key in documents)
    movable = [layout.segment(name), f"{layout.tombstones_prefix(chain)}{bounds}-{name.digest}.json"]
    assert [key for key in (*documents, *movable) if layout.is_foreign(key)] == []
    assert [layout.can_quarantine(key) for key in documents] == [False] * len(documents)
    junk = [f"{key}.tmp" for key in (*movable, layout.chain_document(chain))]
    assert all(layout.is_foreign(key) for key in junk)
    assert all(layout.can_quarantine(key) for key in (*movable, *junk))
    assert all(key.startswith(layout.root) for key in (*documents, *movable))


@given(st.text(max_size=200))
def test_any_text_is_a_foreign_key_and_never_an_error(text: str) -> None:
    layout = Layout("data")
    for key in (
        *(text, f"data/{text}", f"data/_floe/{text}"),
        *(f"data/_floe/tails/{text}", f"data/_floe/alive/{text}", f"data/_floe/ingress/{text}/positions.json"),
        *(f"data/_floe/tombstones/runs/{text}", f"data/_floe/tombstones/runs/site={text}/all.json"),
    ):
        assert (layout.parse_segment(key), layout.parse_chain_document(key)) == (None, None)
        assert layout.parse_state(key) is None
        parsed = layout.parse_tail(key)
        assert parsed is None or layout.tail(parsed) == key
        target = layout.parse_ingress_positions(key)
        assert target is None or layout.ingress_positions(target) == key
        layout.is_foreign(key)
        process = layout.parse_heartbeat(key)
        assert process is None or layout.heartbeat(*process) == key
        run = layout.parse_run(key)
        assert run is None or layout.run(*run) == key


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text("ABCabc019_-%", max_size=12))
def test_encoding_uses_an_allow_list_and_is_undone_and_nothing_else_is_decoded(text: str, other: str) -> None:
    assert set(encode(text)) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%")
    assert decode(encode(text)) == text
    decoded = decode(other)
    assert decoded is None or encode(decoded) == other


@given(chains, st.integers(0, 9), st.lists(st.tuples(ranges, digests), max_size=20), st.data())
def test_start_after_lists_exactly_the_segments_that_reach_the_position(
    chain: Chain, level: int, segments: list[tuple[SequenceRange, str]], data: st.DataObject
) -> None:
    layout = Layout("data")
    edges = [edge for r, _ in segments for edge in (r.first, r.last, min(r.last + 1, MAX_SEQUENCE))]
    position = data.draw(st.sampled_from([*edges, 1, MAX_SEQUENCE]) | sequences)
    keys = {layout.segment(SegmentName(chain, level, r, digest)): r for r, digest in segments}
    after = layout.start_after(chain, level, position)
    listed = {key for key in keys if key.encode() > after.encode()}
    assert listed == {key for key, r in keys.items() if r.last >= position}
