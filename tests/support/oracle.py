"""The verdict on a whole target: every chain against its expected messages, and messages that do not belong there."""

from collections.abc import Mapping
from dataclasses import replace

from common.chain import Chain
from infra.oracle import MAX_EXAMPLES, OracleResult, Trace, compare, sum_comparisons

# The kinds of damage, in the words of the oracle's reports.
CLASSES = ("lost_prefix", "lost_middle", "lost_postfix", "repeated", "out_of_order", "altered", "unexpected")


def compare_target(expected: Mapping[Chain, Trace], found: Mapping[Chain, Trace], foreign: int = 0) -> OracleResult:
    """Compare all chains of `expected` with a target that holds `found`.

    `foreign`: messages of the target without provenance. They, and all messages of chains that are not in
    `expected`, are unexpected. Raises ValueError if an expectation is out of order.
    """
    names = {chain: str(chain) if chain in expected else f"{chain} (no such chain)" for chain in {**expected, **found}}
    none = Trace()
    parts = [compare(expected.get(c, none), found.get(c, none), name=name) for c, name in names.items()]
    strange = (f"unexpected: {foreign} messages without provenance",) if foreign else ()
    whole = sum_comparisons([*parts, OracleResult(found=foreign, unexpected=foreign, examples=strange)], "target")
    return replace(whole, examples=whole.examples[: 4 * MAX_EXAMPLES])


def classes(comparison: OracleResult) -> dict[str, int]:
    """Return the count of each kind of damage."""
    return {name: getattr(comparison, name) for name in CLASSES}
