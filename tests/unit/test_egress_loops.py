"""Which messages claim to be copies of older ones of this feed: by the header block alone."""

from __future__ import annotations

import pytest

from common.chain import Chain
from common.jetstream.headers import Provenance, build_block
from common.segments.columns import Columns
from egress.loops import MOST_CLAIMS, Claims
from tests.support.headers import escape

OURS = Provenance("here", "FEED", 2, 1, 7, 1_700_000_000_000_000_001)
THEIRS = Provenance("there", "FEED", 0, 0, 9, 1_700_000_000_000_000_002)
CLAIMS = Claims(Chain("here", "FEED", 2, 0))
REPLAYED = b"Floe-Replay: 3f0c9a1be27d4455"


@pytest.mark.parametrize(
    "block",
    [
        escape(None, OURS),
        escape(build_block([b"A: 1"]), OURS, first_lines=(b"Nats-Expected-Last-Sequence: 41",)),
        escape(escape(escape(None, OURS), THEIRS), THEIRS),
        escape(escape(None, OURS), THEIRS, relay=True),
        # A replay at another site, or an older one here, does not stand beside the newest hop.
        escape(build_block([OURS.line(), REPLAYED]), THEIRS),
    ],
)
def test_a_hop_of_this_feed_is_found_however_deep_it_was_escaped(block: bytes) -> None:
    assert [CLAIMS.of(sequence, block) for sequence in (8, 7, 6)] == [[OURS], [], []]  # older ones only


@pytest.mark.parametrize(
    "block",
    [
        escape(None, THEIRS),
        *(escape(None, Provenance("here", feed, 2, 1, 7, 1)) for feed in ("OTHER", "FEED2")),
        escape(None, Provenance("here", "FEED", 1, 1, 7, 1)),
        escape(None, Provenance("here", "FEED", 2, 1, 0, 1)),
        build_block([OURS.line(), REPLAYED]),
        build_block([b"X: " + OURS.line()]),
        build_block([OURS.line() + b" 1"]),
        *(build_block([OURS.line().replace(b" 7 ", number)]) for number in (b" x ", b" " + b"7" * 5000 + b" ")),
        build_block([b"floe-source:" + OURS.line().partition(b":")[2]]),
        b"",
    ],
)
def test_what_names_no_older_message_of_this_feed_claims_nothing(block: bytes) -> None:
    assert CLAIMS.of(8, block) == []


def test_of_a_thousand_forged_hops_a_few_are_asked_about() -> None:
    hops = [Provenance("here", "FEED", 2, 0, sequence, 1).line() for sequence in range(1, 1_000)]
    assert [claim.sequence for claim in CLAIMS.of(5_000, build_block(hops))] == [*range(1, MOST_CLAIMS + 1)]


def test_the_places_of_a_batch_are_those_that_claim_something() -> None:
    blocks = [None, escape(None, OURS), build_block([b"A: 1"]), escape(None, THEIRS), escape(None, OURS)]
    count = len(blocks)
    rows = Columns([5, 6, 8, 9, 10], [1] * count, [b"s"] * count, blocks, [b"x"] * count)
    assert CLAIMS.places(rows) == [4]
    assert CLAIMS.places(Columns([1], [1], [b"s"], [None], [b"x"])) == []
