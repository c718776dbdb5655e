"""I6: a header block comes back byte for byte, and nothing in it acts at the target."""

from hypothesis import example, given
from hypothesis import strategies as st

from common.nats.headers import Provenance, parse_block, parse_provenances, split_provenance
from common.nats.protocol import check_headers
from tests.support.headers import escape

HERE = Provenance("us-east", "NODE_DATA", 0, 0, 7, 1_700_000_000_000_000_001)
OURS = b"Nats-Expected-Last-Sequence: 41"

NAMES = st.sampled_from(
    b"Nats-Rollup|nats-msg-id|NATS-TTL|Nats-Schedule|Nats-Expected-Last-Sequence|Floe-Source|Floe-Original|"
    b"FLOE-original|Floe-Block|floe-x|KV-Operation|Content-Type| Nats-Rollup|".split(b"|")
)
VALUES = st.binary(max_size=12) | st.sampled_from(
    [b"", b"  x  ", b"\t", b"Nats-Rollup: all", HERE.line(), b"Floe-Original: y", OURS, b"a\nNats-Rollup: all"]
)
LINES = st.builds(lambda n, s, v: n + s + v, NAMES, st.sampled_from([b": ", b":", b"", b" : "]), VALUES) | st.binary(
    max_size=20
)
WELL_FORMED = st.lists(LINES, max_size=6).map(
    lambda lines: b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in lines), b"\r\n"])
)
BLOCKS = st.none() | st.binary(max_size=60) | WELL_FORMED
CONTROL = st.frozensets(st.sampled_from([b"nats-ttl", b"nats-rollup", b"floe-source", b"floe-x"]))
FIRST = st.lists(st.sampled_from([OURS, b"Nats-Batch-Id: b", b"Nats-Batch-Sequence: 2"]), max_size=3).map(tuple)


@given(block=BLOCKS, control=CONTROL, first=FIRST)
@example(block=b"NATS/1.0\r\n\r\n", control=frozenset(), first=())
@example(block=None, control=frozenset(), first=(OURS,))
@example(block=b"NATS/1.0\r\nFloe-Original:\r\n\r\n", control=frozenset(), first=())
@example(block=b"NATS/1.0\r\nFloe-Block: eA==\r\n\r\n", control=frozenset(), first=())
def test_restore_gives_back_what_was_escaped(block, control, first):
    escaped = escape(block, HERE, control, first)
    check_headers(escaped)
    assert (split_provenance(escaped), parse_provenances(escaped)) == ((HERE, block), [HERE])


@given(block=BLOCKS, first=FIRST)
def test_nothing_of_the_publisher_acts_for_any_reader_and_what_floe_adds_comes_before_it(block, first):
    escaped = escape(block, HERE, frozenset(), first)
    for line in escaped.replace(b"\r", b"\n").split(b"\n")[1:]:
        if line.lower().startswith((b"nats-", b"floe-")):
            assert line in first or line == HERE.line() or line.startswith((b"Floe-Original:", b"Floe-Block: "))
    assert [n for n, _ in parse_block(escaped)].count(b"Floe-Source") == 1
    assert escaped.startswith(b"".join([b"NATS/1.0\r\n", *(line + b"\r\n" for line in (*first, HERE.line()))]))


@given(block=BLOCKS, others=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_hops_add_up_over_relays_and_the_original_stays(block, others):
    travelled, expected = escape(block, HERE, first_lines=(OURS,)), [HERE]
    for number in others:
        hop = Provenance(f"site{number}", "F", 0, 0, number, number)
        travelled, expected = escape(travelled, hop, first_lines=(OURS,), relay=True), [hop, *expected]
    assert (parse_provenances(travelled), split_provenance(travelled)) == (expected, (expected[0], block))


@given(block=BLOCKS)
def test_restore_never_fails_on_what_a_target_holds(block):
    provenance, original = split_provenance(block)
    assert provenance is not None or original == block
