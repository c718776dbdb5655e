"""Chains of an archive: those that a name selects, those that a stream continues, and rows after their end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from common.archive.documents import ChainStore, accept_command, chain_arguments
from common.archive.keys import MAX_LEVEL, FeedId, filter_chains, parse_chain_name, parse_chain_of_feed, resolve_chain
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.errors import Refused, UsageError
from common.exits import floe_command
from common.sequences import MAX_SEQUENCE, SequenceRange, holes

T = TypeVar("T")


def select_chains(chains: ChainStore, text: str | None, feeds: Collection[FeedId] = ()) -> list[Chain]:
    """Return the chains that `SITE[/FEED[/INCARNATION[/PARTITION]]]` names; None means all.

    `feeds`: those of the configuration, which may have no archive yet. A chain that is named in full needs no
    `chain.json` if it has a segment. Raises UsageError, with the names that exist, for one that does not.
    """
    if text is None:
        return chains.chains()
    site, feed, incarnation, partition = parse_chain_name(text)
    if feed is not None and None not in (incarnation, partition):
        chain = Chain(site, feed, incarnation or 0, partition or 0)
        prefixes = (chains.layout.segments_prefix(chain, level) for level in range(MAX_LEVEL + 1))
        if any(chains.objects.list(prefix, limit=1) for prefix in prefixes):
            return [chain]
    return match_chains(chains, site, feed, lambda c: filter_chains(c, feeds, site, feed, incarnation, partition))


def find_chain(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return the chain that `SITE/FEED[/INCARNATION[/PARTITION]]` names; without an incarnation, the newest.

    Raises UsageError as `select_chains`, and if several partitions match.
    """
    site, feed, incarnation, partition = parse_chain_of_feed(text)
    if None not in (incarnation, partition) and (found := select_chains(chains, text, feeds)):
        return found[0]
    return match_chains(chains, site, feed, lambda c: resolve_chain(c, feeds, site, feed, incarnation, partition))


def find_incarnation(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return partition 0 of the incarnation that `SITE/FEED[/INCARNATION]` names; of the newest, if none is named.

    Raises UsageError as `select_chains`, and if a partition is named.
    """
    site, feed, incarnation, partition = parse_chain_of_feed(text)
    if partition is not None:
        raise UsageError(f"{text:.80}: expected SITE/FEED[/INCARNATION], found a partition")
    found = match_chains(chains, site, feed, lambda c: filter_chains(c, feeds, site, feed, incarnation))
    return Chain(site, feed, max((chain.incarnation for chain in found), default=incarnation or 0))


def match_chains(chains: ChainStore, site: str | None, feed: str | None, find: Callable[[Collection[Chain]], T]) -> T:
    """Return the result of `find` for the chains of a site or feed. If it finds none, its error lists all chains."""
    try:
        return find(chains.chains(site, feed))
    except UsageError as error:
        try:
            known = chains.chains()
        except Refused:  # the credential is for one site only
            raise error from None
        return find(known)


def chain_ends(chains: ChainStore, newest: Chain) -> dict[Chain, int]:
    """Return the chains of the stream up to the incarnation of `newest`, each with the last of its sequences that
    counts: all of that incarnation (MAX_SEQUENCE), and those of the earlier ones that it continues. Blocking.

    Raises the errors of the store, and DataError for an invalid document.
    """
    known, found, number = chains.chains(newest.site, newest.feed), dict[Chain, int](), newest.incarnation
    of = {chain: MAX_SEQUENCE for chain in known if chain.incarnation == number}
    while of:
        found |= of
        document = chains.read_stream(replace(newest, incarnation=number, partition=0))
        former = number - 1 if document is None or document.continued is None else document.continued
        if document is None or not document.join_sequences or not 0 <= former < number:
            break
        own = {chain.partition: end for chain, end in of.items()}
        reach = {part: min(own.get(part, MAX_SEQUENCE), at - 1) for part, at in document.join_sequences.items()}
        before = chains.read_stream(replace(newest, incarnation=former, partition=0))
        cuts = [[each.filters for each in found.chains] for found in (document, before) if found is not None]
        if len({*reach.values()}) > 1 and cuts[0] != cuts[-1]:
            break  # the end of one partition implies nothing about others with other subjects
        least, number = min(reach.values()), former
        ends = {chain: reach.get(chain.partition, least) for chain in known if chain.incarnation == former}
        of = {chain: end for chain, end in ends.items() if end > 0}
    return found


def first_sequence(chains: ChainStore, chain: Chain) -> int:
    """Return the sequence at which a chain begins: that of `chain.json`, or the floor if that is greater; else 1."""
    document = chains.read_chain(chain)
    return max(document.first if document else 1, chains.read_floor(chain) or 1)


def span(refs: Sequence[SegmentRef]) -> SequenceRange | None:
    """Return the range from the first to the last sequence that `refs` cover, holes included; None without segments."""
    if not refs:
        return None
    return SequenceRange(min(r.coverage.first for r in refs), max(r.coverage.last for r in refs))


def ranges_after_end(
    coverages: Iterable[SequenceRange], end: int | None, accepted: Iterable[SequenceRange] = ()
) -> list[SequenceRange]:
    """Return the covered ranges after `end` without the `accepted` gaps, ascending.

    `end`: the last sequence of the ended incarnation, None while it has not ended.
    """
    ranges = list(coverages)
    last = max((each.last for each in ranges), default=0)
    if end is None or last <= end:
        return []
    whole = SequenceRange(min(end + 1, MAX_SEQUENCE), last)
    return holes([*holes(ranges, whole), *accepted], whole)


def replay_command(chain: Chain, rows: SequenceRange) -> str:
    stream = shlex.quote(f"{chain.feed}_{chain.incarnation:04d}")
    bounds = f"--from-sequence {rows.first} --to-sequence {rows.last}"
    target = f"--target {stream} --subject-prefix {stream}"
    return floe_command("replay", chain_arguments(chain), bounds, target, "--create --append")


def leftover_remedies(chain: Chain, rows: SequenceRange) -> str:
    return (
        f"replay them into a stream of their own:\n{replay_command(chain, rows)}\n"
        f"or accept them as a gap; the segments stay:\n{accept_command(chain, rows)}"
    )
