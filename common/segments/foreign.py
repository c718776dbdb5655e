"""Objects under the prefix that are none of Floe's, renamed by a tool, or junk: nothing reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.objects.port import ObjectInfo, ObjectStore, Paged
from common.segments.keys import Layout

SHOWN = 100  # keys that are named


@dataclass(slots=True)
class Foreign:
    """How many foreign keys there are, and the first of them. `looked_at`: of how many keys; `is_whole`:
    whether these were all.
    """

    keys: list[str]
    count: int = 0
    looked_at: int = 0
    is_whole: bool = True

    def lines(self) -> list[str]:
        """It for people; empty where there is none."""
        if not self.count:
            return []
        of = (
            "" if self.is_whole else f" among the first {self.looked_at}; `floe segments verify` looks at all"
        )
        more = self.count - len(self.keys)
        return [
            f"keys that are none of Floe's, and that nothing reads: {self.count}{of}",
            *(f"  {key}" for key in self.keys),
            *([f"  and {more} more"] if more else []),
        ]


def look_for_foreign(
    objects: ObjectStore, layout: Layout, prefixes: Iterable[str] = (), limit: int | None = None
) -> Foreign:
    """The foreign keys below `prefixes` (none: below the layout's), of at most about `limit` keys."""
    found = Foreign([])
    for page in _pages(objects, list(prefixes) or [layout.root]):
        if limit is not None and found.looked_at >= limit:
            found.is_whole = False
            break
        found.looked_at += len(page)
        for key in (info.key for info in page if layout.is_foreign(info.key)):
            found.count += 1
            if len(found.keys) < SHOWN:
                found.keys.append(key)
    return found


def _pages(objects: ObjectStore, prefixes: Iterable[str]) -> Iterator[list[ObjectInfo]]:
    for prefix in prefixes:
        if isinstance(objects, Paged):
            yield from objects.pages(prefix)
        else:
            yield objects.list(prefix)
