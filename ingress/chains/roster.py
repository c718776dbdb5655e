"""Which chains may flow into a target, and when each may begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from common.chain import Chain
from common.errors import ConfigError, Stopped
from common.service.metrics import begin
from common.service.pasting import ways
from common.settings.ingress import SourceSettings, TargetSettings
from ingress.chains.chain_state import Lane
from ingress.chains.plan import unfinished
from ingress.checkpoints.commands import set_command
from ingress.hints import set_position
from ingress.rows.prepare import Preparer, Shape
from ingress.rows.subjects import rule_of

Positions = Mapping[Chain, int]


class Roster:
    """The lanes of one target. `sources` of the configuration is the allow-list: no other chain gets one."""

    def __init__(self, settings: TargetSettings, shape: Shape) -> None:
        self._settings, self._shape = settings, shape
        self._sources = {pair: source for source in settings.sources for pair in source.pairs()}
        self._lanes: dict[Chain, Lane] = {}
        self._archived: dict[Chain, int] = {}
        self._previous: dict[Chain, Mapping[int, int] | None] = {}
        self._unread: dict[Chain, str] = {}
        for site, feed in self._sources:
            begin("ingress_", site=site, feed=feed)

    @property
    def target(self) -> str:
        """The name of the target stream."""
        return self._settings.stream

    @property
    def shape(self) -> Shape:
        """What rows are made ready for."""
        return self._shape

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def get(self, chain: Chain) -> Lane | None:
        """The lane of `chain`; None if it has none."""
        return self._lanes.get(chain)

    def pairs(self) -> list[tuple[str, str]]:
        """The (site, feed) that may flow in."""
        return list(self._sources)

    def allows(self, chain: Chain) -> bool:
        """Whether the chain may flow in."""
        return (chain.site, chain.feed) in self._sources

    def preparer(self, chain: Chain) -> Preparer:
        """What makes the rows of `chain` ready. Raises ConfigError for a chain that may not flow in."""
        source = self._sources.get((chain.site, chain.feed))
        if source is None:
            raise ConfigError(
                f"target {self._settings.stream}: sources: expected {chain.site}/{chain.feed}, found none",
                hint=ways(
                    (
                        "an intent holds rows of it: list it again until it ran once; or drop the rest of it",
                        set_command(self.target, "--accept"),
                    )
                ),
                code="E-SOURCES",
            )
        return Preparer(chain, rule_of(source), self._shape)

    def source(self, chain: Chain) -> SourceSettings:
        """The source entry of a chain that may flow in."""
        return self._sources[chain.site, chain.feed]

    def reshape(self, shape: Shape) -> None:
        """The target takes other messages than before: rows are prepared for it as it is now."""
        if shape == self._shape:
            return
        self._shape = shape
        for lane in self._lanes.values():
            lane.preparer = self.preparer(lane.chain)

    def add(self, chain: Chain, positions: Positions) -> Lane | None:
        """The lane of `chain`, made if it is new; None for a chain that may not flow in."""
        if not self.allows(chain):
            return None
        lane = self._lanes.get(chain)
        if lane is None:
            lane = self._lanes[chain] = self._lane(chain, positions)
            partition = str(chain.partition)
            begin("ingress_", target=self.target, site=chain.site, feed=chain.feed, partition=partition)
        return lane

    def archive(self, chain: Chain, end: int) -> None:
        """The chain's coverage ends at `end`, as its tail says."""
        self._archived[chain] = end
        if lane := self._lanes.get(chain):
            lane.archived = end

    def reset(self, positions: Positions) -> list[Lane]:
        """Make all lanes anew, standing at `positions`; those that may be looked at at once."""
        former, self._lanes = self._lanes, {}
        for chain, lane in former.items():
            self._lanes[chain] = self._lane(chain, positions)
            self._lanes[chain].is_due = lane.is_due
        return [lane for lane in self._lanes.values() if not lane.is_due]

    def renew(self, lane: Lane, positions: Positions) -> Lane:
        """A lane of the same chain in place of `lane`, standing at `positions`; what was read for the former
        belongs to nobody.
        """
        renewed = self._lanes[lane.chain] = self._lane(lane.chain, positions)
        return renewed

    def _lane(self, chain: Chain, positions: Positions) -> Lane:
        archived = self._archived.get(chain, 0)
        lane = Lane(chain, self.preparer(chain), positions.get(chain, 0), archived=archived)
        lane.end = self._end(chain, positions)
        # A tail tells whether there is more to be found; without one only all levels do.
        lane.look_everywhere = archived == 0
        return lane

    # Incarnations

    def needs_previous(self) -> list[Chain]:
        """One chain of each incarnation above 0 whose `stream.json` was not read yet."""
        found = {_whole(chain): chain for chain in self._lanes if chain.incarnation}
        return [chain for whole, chain in found.items() if whole not in self._previous]

    def set_previous(self, chain: Chain, previous: Mapping[int, int] | None, positions: Positions) -> None:
        """What `stream.json` of the chain's incarnation says of the ends of the one before
        (None: nothing).
        """
        self._previous[_whole(chain)] = previous
        for lane in self._lanes.values():
            lane.ends_at(self._end(lane.chain, positions))

    def cannot_read(self, chain: Chain, why: str) -> bool:
        """`stream.json` of the chain's incarnation is there and cannot be read; whether that is news."""
        is_news = self._unread.get(_whole(chain)) != why
        self._unread[_whole(chain)] = why
        return is_news

    def _end(self, chain: Chain, positions: Positions) -> int | None:
        """Where the chain's incarnation ended; None while it has not, as far as known."""
        previous = self._previous.get(_whole(chain.next_incarnation()))
        if previous is not None:
            return previous.get(chain.partition, 0)
        later = any(
            (other.site, other.feed) == (chain.site, chain.feed) and other.incarnation > chain.incarnation
            for other in positions
        )
        # The next one has begun: what appears behind is reported, never delivered by itself.
        return positions.get(chain, 1) - 1 if later else None

    def obstacle(self, lane: Lane, positions: Positions) -> str:
        """What keeps a lane from beginning, and passes by itself; empty if nothing does."""
        chain = lane.chain
        if chain.incarnation == 0:
            return ""
        if _whole(chain) not in self._previous:
            return self._unread.get(_whole(chain), "stream.json is not there yet")
        previous = self._previous[_whole(chain)]
        if previous is None:
            return ""
        left = unfinished(chain, previous, positions)
        return "; ".join(f"{before} stands at {at} and ends at {end}" for before, (at, end) in left.items())

    def check_may_begin(self, chain: Chain, first: int) -> None:
        """Raises Stopped where an operator decides whether an incarnation begins. `first`: where it would."""
        if chain.incarnation == 0:
            return
        begin = set_position(self._settings.stream, chain, first)
        if self._previous.get(_whole(chain)) is None:
            raise Stopped(
                f"chain {chain}: stream.json: expected the ends of the incarnation before, found none",
                hint=ways(("to begin it all the same", begin)),
                code="E-INCARNATION",
            )
        if self._settings.on_new_incarnation == "halt":
            raise Stopped(
                f"chain {chain}: a new incarnation begins at {first}",
                hint=ways(("to go on with it", begin)),
                code="E-INCARNATION",
            )


def _whole(chain: Chain) -> Chain:
    """The same for all partitions of an incarnation."""
    return Chain(chain.site, chain.feed, chain.incarnation)
