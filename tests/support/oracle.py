"""Judges a whole target: every chain against what it must be, and what does not belong there at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.chain import Chain
from infra.oracle import MAX_EXAMPLES, Comparison, Trace, compare, total

# What the oracle tells apart, in the words of its reports.
CLASSES = ("lost_prefix", "lost_middle", "lost_postfix", "repeated", "out_of_order", "altered", "unexpected")


def compare_target(
    expected: Mapping[Chain, Trace], found: Mapping[Chain, Trace], foreign: int = 0, name: str = "target"
) -> Comparison:
    """What became of all chains of `expected` in a target that holds `found`.

    `foreign`: messages of the target without provenance. They, and all messages of chains that are not in
    `expected`, are unexpected. Raises ValueError where an expectation is out of order.
    """
    compared = [compare(trace, found.get(chain, Trace()), name=str(chain)) for chain, trace in expected.items()]
    whole = total([*compared, *_strangers(expected, found), _without_provenance(foreign)], name)
    return replace(whole, examples=whole.examples[: 4 * MAX_EXAMPLES])


def classes(comparison: Comparison) -> dict[str, int]:
    """The count of each kind of damage."""
    return {name: getattr(comparison, name) for name in CLASSES}


def _strangers(expected: Mapping[Chain, Trace], found: Mapping[Chain, Trace]) -> list[Comparison]:
    """All that came from chains that nobody expected."""
    return [
        compare(Trace(), trace, name=f"{chain} (no such chain)")
        for chain, trace in found.items()
        if chain not in expected
    ]


def _without_provenance(count: int) -> Comparison:
    examples = (f"unexpected: {count} messages without provenance",) if count else ()
    return Comparison(found=count, unexpected=count, examples=examples)
