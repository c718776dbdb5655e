"""Where a value of the settings stands in the file it came from, defaults and overrides included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.settings.yaml import Items, KeyPath, Keys, Mark, Node, Scalar

#: A section, and where the keys come from that it does not have itself (`*`: any entry of a list).
FALLBACKS: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("egress", "nats"), ("nats",)),
    (("ingress", "nats"), ("nats",)),
    (("egress", "feeds", "*"), ("egress", "defaults")),
    (("ingress", "targets", "*", "sources", "*"), ("ingress", "defaults")),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A value in the file. `node`: None where the file has no such key; `mark` then is the section's."""

    mark: Mark
    key_mark: Mark
    path: KeyPath
    node: Node | None


def locate(root: Keys, location: Sequence[str | int]) -> Place:
    """The place of the value at `location`, as pydantic names it."""
    wanted = [part for part in location if not str(part).startswith(("(", "["))]
    nearest = Place(root.mark, root.mark, (), root)
    places = [nearest]
    for index, part in enumerate(wanted):
        below = [found for place in places for found in _step(place, part)]
        below += _fallback(root, wanted[: index + 1])
        if places and not below:
            nearest = _without(places[0], wanted[index:])
        places = below  # none: a fallback may still be found further down
    return places[0] if places else nearest


def _step(place: Place, part: str | int) -> Iterator[Place]:
    node, path = place.node, (*place.path, part)
    if isinstance(node, Keys) and part in node.entries:
        below = node.entries[str(part)]
        yield Place(below.mark, node.marks[str(part)], path, below)
    elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
        below = node.items[part]
        yield Place(below.mark, below.mark, path, below)


def _fallback(root: Keys, wanted: Sequence[str | int]) -> list[Place]:
    pattern = tuple("*" if isinstance(part, int) else part for part in wanted)
    found = [locate(root, source) for section, source in FALLBACKS if section == pattern]
    return [place for place in found if place.node is not None]


def _without(place: Place, missing: Sequence[str | int]) -> Place:
    """Where the keys `missing` would stand, were they in the file."""
    if isinstance(place.node, Scalar):  # one value that stands for a list
        return place
    return Place(place.mark, place.mark, (*place.path, *missing), None)
