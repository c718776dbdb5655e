"""What an operator's name of a chain means among the chains that there are; pure.

A name that is not there is an error that says which are, or a slip would look like an empty archive. Only a
feed of the configuration may be named before anything of it is archived. Where one chain is wanted, that of
the newest incarnation is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from common.chain import Chain
from common.errors import UsageError

if TYPE_CHECKING:
    from common.settings.root import Settings

Pair = tuple[str, str]  # site, feed

MOST_NAMES = 20  # that an error lists


def configured(settings: Settings) -> frozenset[Pair]:
    """The feeds that the configuration names: those that this site freezes, and those that targets carry."""
    own = {(settings.site, feed.name) for feed in settings.egress.feeds}
    carried = {pair for t in settings.ingress.targets for source in t.sources for pair in source.pairs()}
    return frozenset(own | carried)


def chosen(
    known: Collection[Chain],
    feeds: Collection[Pair],
    site: str | None,
    feed: str | None = None,
    incarnation: int | None = None,
    partition: int | None = None,
) -> list[Chain]:
    """Those of `known` that are meant, None means all; none where only `feeds`, of the configuration, has it.

    Raises UsageError with the names that there are.
    """
    wanted = (site, feed, incarnation, partition)
    found = sorted(c for c in known if _is_meant((c.site, c.feed, c.incarnation, c.partition), wanted))
    if found or wanted == (None, None, None, None):
        return found
    of_feed = [c for c in known if _is_meant((c.site, c.feed), (site, feed))]
    if of_feed:
        raise _no_such_chain(of_feed, incarnation, partition)
    if any(_is_meant(pair, (site, feed)) for pair in feeds):
        return []
    raise unknown({*feeds, *((c.site, c.feed) for c in known)}, site, feed)


def one(
    known: Collection[Chain],
    feeds: Collection[Pair],
    site: str,
    feed: str,
    incarnation: int | None = None,
    partition: int | None = None,
) -> Chain:
    """The one chain that is meant: of the newest incarnation, and of its only partition, where not named.

    Raises UsageError as `chosen`, and where several partitions may be meant.
    """
    there = chosen(known, feeds, site, feed, incarnation)
    if not there:
        return Chain(site, feed, incarnation or 0, partition or 0)
    newest = max(chain.incarnation for chain in there)
    found = chosen(known, feeds, site, feed, newest, partition)
    if len(found) > 1:
        raise UsageError(
            f"{site}/{feed}: expected one chain, found partitions "
            f"{_listed(str(chain.partition) for chain in found)}",
            hint="name the partition",
        )
    return found[0]


def parse(text: str) -> tuple[str, str | None, int | None, int | None]:
    """The parts of `SITE[/FEED[/INCARNATION[/PARTITION]]]`, None for what is not named. Raises UsageError."""
    parts = text.split("/")
    try:
        numbers = [int(part) for part in parts[2:]]
        if len(parts) > 4 or not all(parts):
            raise ValueError("expected SITE[/FEED[/INCARNATION[/PARTITION]]]")
        Chain(parts[0], parts[1] if len(parts) > 1 else "ANY", *numbers)
    except ValueError as error:
        raise UsageError(f"chain {text!r}: {error}") from error
    incarnation, partition = (*numbers, None, None)[:2]
    return parts[0], parts[1] if len(parts) > 1 else None, incarnation, partition


def unknown(pairs: Collection[Pair], site: str | None, feed: str | None) -> UsageError:
    """The error for a site or a feed that is none of `pairs`."""
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
    """What may have been meant by `found`, and what there is."""
    there = sorted(names)
    close = difflib.get_close_matches(found, there, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}there are {_listed(there)}" if there else "there are none"


def _no_such_chain(of_feed: Sequence[Chain], incarnation: int | None, partition: int | None) -> UsageError:
    asked = [] if incarnation is None else [f"incarnation {incarnation:04d}"]
    asked += [] if partition is None else [f"partition {partition}"]
    names = {str(chain) for chain in of_feed}
    return UsageError(
        f"{' '.join(asked)}: expected one that there is, found none of that number",
        hint=f"there are {_listed(sorted(names))}",
    )


def _is_meant(found: tuple[object, ...], wanted: tuple[object, ...]) -> bool:
    return all(w in (None, f) for f, w in zip(found, wanted, strict=True))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(listed[:MOST_NAMES]) + more
