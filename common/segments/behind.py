"""Coverage behind the end of an incarnation: `stream.json` of the next one says where that end is.

It is there where two sources wrote under one name, or where an instance put late. Nobody delivers it by
itself; an operator carries it into a stream, or gives it up, which is kept as an accepted gap. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from common.chain import Chain
from common.sequences import MAX_SEQUENCE, SequenceRange, holes
from common.service.pasting import command


def behind(
    coverages: Iterable[SequenceRange], end: int | None, accepted: Iterable[SequenceRange] = ()
) -> list[SequenceRange]:
    """What is covered behind `end` and nobody has given up, ascending.

    `end`: where the incarnation ended, None while it has not.
    """
    ranges = list(coverages)
    last = max((each.last for each in ranges), default=0)
    if end is None or last <= end:
        return []
    whole = SequenceRange(min(end + 1, MAX_SEQUENCE), last)
    return holes([*holes(ranges, whole), *accepted], whole)


def carry(chain: Chain, rows: SequenceRange) -> str:
    """Put what is there into a stream of its own."""
    stream = f"{chain.feed}_{chain.incarnation:04d}"
    options = ["--site", chain.site, "--feed", shlex.quote(chain.feed)]
    options += ["--incarnation", str(chain.incarnation), "--partition", str(chain.partition)]
    options += ["--from-sequence", str(rows.first), "--to-sequence", str(rows.last)]
    options += ["--target", shlex.quote(stream), "--subject-prefix", shlex.quote(stream)]
    return command("replay", *options, "--create --append")


def give_up(chain: Chain, rows: SequenceRange) -> str:
    """Deliver it to nobody; the segments stay."""
    options = ["--site", chain.site, "--feed", shlex.quote(chain.feed)]
    options += ["--incarnation", str(chain.incarnation), "--partition", str(chain.partition)]
    return command("gap accept", *options, f"--first {rows.first} --last {rows.last}")


def ways_on(chain: Chain, rows: SequenceRange) -> str:
    """The two commands, one to choose."""
    return (
        f"carry them into a stream of their own:\n{carry(chain, rows)}\n"
        f"or give them up for good; the segments stay:\n{give_up(chain, rows)}"
    )
