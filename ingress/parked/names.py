"""Keys of parked messages, both directions, and what they say together.

    {prefix}/_floe/ingress/{target}/parked/{created}/{site}/{feed}/{incarnation}/{partition}/{sequence:020d}/…
        message          the message itself, put before the piece that leaves it out is in an intent
        left_out         that piece's intent is about to be closed: the chain passes without this message
        asked-{n:04d}    an operator asks for the n-th time that it be tried again
        answered-{n:04d} it still has no place at the target, and why
        delivered        the intent that holds it is about to be closed
    {prefix}/_floe/ingress/{target}/parked/asked
        rung             written anew with each request: so the service sees one without a listing

`created` is that of the stream for which the first was parked, as the state says (`ParkedAs`): what was
parked for a stream that is gone is nothing to one of the same name. Where an operator has a chain go back
it has a `+1`, `+2`, … behind it, so that what was parked before stands for nothing.
But for `rung`, nothing here is written twice with other bytes, and nothing is deleted by Floe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from common.chain import Chain
from common.objects.port import ObjectInfo
from common.segments.keys import Layout, decode, encode
from common.sequences import MAX_SEQUENCE

_KEY = re.compile(
    r"(?P<created>[^/]+)/(?P<site>[^/]+)/(?P<feed>[^/]+)/(?P<incarnation>[0-9]{4})"
    r"/(?P<partition>0|[1-9][0-9]{0,4})/(?P<sequence>[0-9]{20})"
    r"/(?P<what>message|left_out|delivered|(?P<turn>asked|answered)-(?P<number>[0-9]{4}))"
)


class State(StrEnum):
    """What is known of a parked message."""

    PENDING = "pending"  # kept, but its chain has not passed without it: it may still go in its turn
    PARKED = "parked"
    ASKED = "asked for"
    DELIVERED = "delivered"


@dataclass(frozen=True, slots=True, order=True)
class ParkedName:
    """Which message: of a chain, for one target as it was `created`."""

    chain: Chain
    sequence: int
    created: str


@dataclass(slots=True)
class Entry:
    """What a listing shows of one parked message. `size`, `since` (seconds since 1970): its object's."""

    name: ParkedName
    size: int = 0
    since: float = 0.0
    is_kept: bool = False
    is_left_out: bool = False
    is_delivered: bool = False
    turns: dict[str, int] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """How often it was asked for."""
        return self.turns.get("asked", 0)

    @property
    def answered(self) -> int:
        """The last request that was answered; 0 if none was."""
        return self.turns.get("answered", 0)

    @property
    def state(self) -> State:
        if self.is_delivered:
            return State.DELIVERED
        if not self.is_left_out:
            return State.PENDING
        return State.ASKED if self.asked > self.answered else State.PARKED


@dataclass(frozen=True, slots=True)
class ParkedKeys:
    """The keys of one target's parked messages."""

    layout: Layout
    target: str

    @property
    def prefix(self) -> str:
        """What all of them begin with; ends in a slash."""
        return f"{self.layout.ingress_prefix(self.target)}parked/"

    def created_prefix(self, created: str) -> str:
        """What those of the target as it was `created` begin with; ends in a slash."""
        return f"{self.prefix}{encode(created)}/"

    @property
    def rung(self) -> str:
        """What is written with each request."""
        return f"{self.prefix}asked/rung"

    def folder(self, name: ParkedName) -> str:
        """What the keys of one message begin with; ends in a slash."""
        chain = name.chain
        parts = f"{encode(chain.site)}/{encode(chain.feed)}/{chain.incarnation:04d}/{chain.partition}"
        return f"{self.created_prefix(name.created)}{parts}/{name.sequence:020d}/"

    def message(self, name: ParkedName) -> str:
        return f"{self.folder(name)}message"

    def left_out(self, name: ParkedName) -> str:
        return f"{self.folder(name)}left_out"

    def delivered(self, name: ParkedName) -> str:
        return f"{self.folder(name)}delivered"

    def asked(self, name: ParkedName, number: int) -> str:
        return f"{self.folder(name)}asked-{number:04d}"

    def answered(self, name: ParkedName, number: int) -> str:
        return f"{self.folder(name)}answered-{number:04d}"

    def entries(self, listing: Iterable[ObjectInfo]) -> dict[ParkedName, Entry]:
        """What a listing says of each message, in order; foreign keys are passed over."""
        found: dict[ParkedName, Entry] = {}
        for info in listing:
            match = _KEY.fullmatch(info.key.removeprefix(self.prefix))
            name = match and _name(match)
            if match and name:
                _note(found.setdefault(name, Entry(name)), match, info)
        return dict(sorted(found.items()))


def _note(entry: Entry, match: re.Match[str], info: ObjectInfo) -> None:
    if match["what"] == "message":
        entry.is_kept, entry.size, entry.since = True, info.size, info.modified
    elif match["what"] == "left_out":
        entry.is_left_out = True
    elif match["what"] == "delivered":
        entry.is_delivered = True
    else:
        entry.turns[match["turn"]] = max(int(match["number"]), entry.turns.get(match["turn"], 0))


def _name(match: re.Match[str]) -> ParkedName | None:
    site, feed, created = (decode(match[part]) for part in ("site", "feed", "created"))
    sequence = int(match["sequence"])
    if site is None or feed is None or created is None or not 1 <= sequence <= MAX_SEQUENCE:
        return None
    try:
        chain = Chain(site, feed, int(match["incarnation"]), int(match["partition"]))
    except ValueError:
        return None
    return ParkedName(chain, sequence, created)


def waiting(entries: Mapping[ParkedName, Entry]) -> int:
    """How many of the messages are left out and not delivered."""
    return sum(entry.state in (State.PARKED, State.ASKED) for entry in entries.values())
