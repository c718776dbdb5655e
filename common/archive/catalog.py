"""Chains of an archive: those that a name selects, those that a stream continues, and rows after their end.

An operator's name of a chain is looked up among the existing chains. An unknown name is an error that lists the
existing ones: otherwise a typing error would look like an empty archive. Only a feed of the configuration may be named
before anything of it is archived. If one chain is wanted, that of the newest incarnation is meant.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.archive.documents import ChainStore, accept_command, chain_arguments
from common.archive.keys import MAX_LEVEL
from common.archive.segment import SegmentRef
from common.chain import CHAIN_FORM, Chain, parse_chain_parts
from common.errors import Refused, UsageError
from common.exits import floe_command
from common.sequences import MAX_SEQUENCE, SequenceRange, holes

if TYPE_CHECKING:
    from common.settings.root import Settings

T = TypeVar("T")

FeedId = tuple[str, str]  # site, feed

MAX_LISTED_NAMES = 20  # in the text of one error


class ChainName(NamedTuple):
    """The parts of chains that an operator names; None: any."""

    site: str | None = None
    feed: str | None = None
    incarnation: int | None = None
    partition: int | None = None

    def matches(self, *parts: str | int) -> bool:
        """True if the first parts of a chain, such as its site and feed, are as they are named."""
        return all(own in (None, part) for own, part in zip(self, parts, strict=False))


def configured_feeds(settings: Settings) -> frozenset[FeedId]:
    own = {(settings.site, feed.name) for feed in settings.egress.feeds}
    received = {pair for t in settings.ingress.targets for source in t.sources for pair in source.site_feed_pairs()}
    return frozenset(own | received)


def filter_chains(known: Collection[Chain], feeds: Collection[FeedId], name: ChainName) -> list[Chain]:
    """Return those of `known` that are named; empty if only `feeds`, of the configuration, has them.

    Raises UsageError with the names that exist.
    """
    found = sorted(c for c in known if name.matches(c.site, c.feed, c.incarnation, c.partition))
    if found or name == ChainName():
        return found
    if of_feed := [c for c in known if name.matches(c.site, c.feed)]:
        raise _no_such_chain(of_feed, name)
    if any(name.matches(*pair) for pair in feeds):
        return []
    raise unknown_name_error({*feeds, *((c.site, c.feed) for c in known)}, name.site, name.feed)


def resolve_chain(known: Collection[Chain], feeds: Collection[FeedId], name: ChainName) -> Chain:
    """Return the one chain that is meant: the newest incarnation and the only partition, if they are not named. The
    name has a site and a feed.

    Raises UsageError as `filter_chains`, and if several partitions match.
    """
    if not (there := filter_chains(known, feeds, name._replace(partition=None))):
        return Chain(str(name.site), str(name.feed), name.incarnation or 0, name.partition or 0)
    newest = max(chain.incarnation for chain in there)
    found = filter_chains(known, feeds, name._replace(incarnation=newest))
    if len(found) > 1:
        partitions = _name_list(str(c.partition) for c in found)
        raise UsageError(
            f"{name.site}/{name.feed}: expected one chain, found partitions {partitions}",
            hint=f"name the partition, such as {found[-1]}",
        )
    return found[0]


def parse_chain_name(text: str) -> ChainName:
    """Parse `SITE[/FEED[/INCARNATION[/PARTITION]]]`. Raises UsageError."""
    try:
        return ChainName(*parse_chain_parts(text))
    except ValueError as error:
        raise UsageError(str(error)) from None


def parse_chain_of_feed(text: str) -> ChainName:
    """Return the same as `parse_chain_name`, but require the feed."""
    if (name := parse_chain_name(text)).feed is None:
        raise UsageError(f"chain {text!r:.80}: expected {CHAIN_FORM}")
    return name


def unknown_name_error(pairs: Collection[FeedId], site: str | None, feed: str | None) -> UsageError:
    if feed is None:
        found, names, what = str(site), {each for each, _ in pairs}, "site"
    elif site is None:
        found, names, what = feed, {each for _, each in pairs}, "feed"
    else:
        found, names, what = f"{site}/{feed}", {"/".join(pair) for pair in pairs}, "feed"
    return UsageError(
        f"{found}: expected a {what} of the archive or the configuration, found none of that name",
        hint=suggestion(found, names),
    )


def suggestion(found: str, names: Iterable[str]) -> str:
    there = sorted(names)
    close = difflib.get_close_matches(found, there, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}there are {_name_list(there)}" if there else "there are none"


def _no_such_chain(of_feed: Sequence[Chain], name: ChainName) -> UsageError:
    wanted = [] if name.incarnation is None else [f"incarnation {name.incarnation:04d}"]
    wanted += [] if name.partition is None else [f"partition {name.partition}"]
    return UsageError(
        f"{' '.join(wanted)}: expected an existing one, found none of that number",
        hint=f"there are {_name_list(sorted({str(chain) for chain in of_feed}))}",
    )


def _name_list(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED_NAMES} more" if len(listed) > MAX_LISTED_NAMES else ""
    return ", ".join(listed[:MAX_LISTED_NAMES]) + more


def select_chains(chains: ChainStore, text: str | None, feeds: Collection[FeedId] = ()) -> list[Chain]:
    """Return the chains that `SITE[/FEED[/INCARNATION[/PARTITION]]]` names; None means all.

    `feeds`: those of the configuration, which may have no archive yet. A chain that is named in full needs no
    `chain.json` if it has a segment. Raises UsageError, with the names that exist, for one that does not.
    """
    if text is None:
        return chains.chains()
    name = parse_chain_name(text)
    if None not in name:
        chain = Chain.parse(text)
        prefixes = (chains.layout.segments_prefix(chain, level) for level in range(MAX_LEVEL + 1))
        if any(chains.objects.list(prefix, limit=1) for prefix in prefixes):
            return [chain]
    return match_chains(chains, name, lambda known: filter_chains(known, feeds, name))


def find_chain(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return the chain that `SITE/FEED[/INCARNATION[/PARTITION]]` names; without an incarnation, the newest.

    Raises UsageError as `select_chains`, and if several partitions match.
    """
    name = parse_chain_of_feed(text)
    if None not in name and (found := select_chains(chains, text, feeds)):
        return found[0]
    return match_chains(chains, name, lambda known: resolve_chain(known, feeds, name))


def find_incarnation(chains: ChainStore, text: str, feeds: Collection[FeedId] = ()) -> Chain:
    """Return partition 0 of the incarnation that `SITE/FEED[/INCARNATION]` names; of the newest, if none is named.

    Raises UsageError as `select_chains`, and if a partition is named.
    """
    name = parse_chain_of_feed(text)
    if name.partition is not None:
        raise UsageError(f"{text:.80}: expected SITE/FEED[/INCARNATION], found a partition")
    found = match_chains(chains, name, lambda known: filter_chains(known, feeds, name))
    newest = max((chain.incarnation for chain in found), default=name.incarnation or 0)
    return Chain(str(name.site), str(name.feed), newest)


def match_chains(chains: ChainStore, name: ChainName, find: Callable[[Collection[Chain]], T]) -> T:
    """Return the result of `find` for the chains of the site and feed that are named. If it finds none, its error lists
    all chains.
    """
    try:
        return find(chains.chains(name.site, name.feed))
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
        document = chains.read_stream(newest.with_incarnation(number).with_partition(0))
        former = number - 1 if document is None or document.continued is None else document.continued
        if document is None or not document.join_sequences or not 0 <= former < number:
            break
        own = {chain.partition: end for chain, end in of.items()}
        reach = {part: min(own.get(part, MAX_SEQUENCE), at - 1) for part, at in document.join_sequences.items()}
        before = chains.read_stream(newest.with_incarnation(former).with_partition(0))
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
