"""Changes of a site's source stream: recreated, set back, purged, deleted for a while, an older copy restored."""

import copy
from collections.abc import Callable
from typing import Any

from tests.sim import api
from tests.sim.auditor import SourceTap
from tests.sim.consumers import Consumer
from tests.sim.nats import SimNats
from tests.sim.streams import Stream
from tests.sim.world import NS, World

KINDS = ("recreate", "set_back", "remove", "bring_back", "purge_beyond")
FIRST, BETWEEN = (5.0, 20.0), ((6.0, 20.0), (50.0, 70.0))  # seconds until the first change, and between two
COPIES_EVERY = 3.0
POINTS = ("egress.before_put", "egress.after_put", "egress.sealed", "egress.before_ack")  # failpoints for a change
APART = ("world", "tap")  # attributes that a copy leaves out
RECEIVED_WITHIN = 3.0  # seconds until egress has received a message, without other faults


class SourceChanges:
    """One or two changes of `stream`. `is_allowed`: asked before each, by its kind.

    `is_quiet`: there are no other faults, so messages that egress had received before the first change are owed.
    """

    chance = "changes"
    kinds: tuple[str, ...] = KINDS

    def __init__(
        self, nats: SimNats, tap: SourceTap, stream: str, is_allowed: Callable[[str], bool], *, is_quiet: bool
    ) -> None:
        self._nats, self._tap, self._stream, self._is_allowed = nats, tap, stream, is_allowed
        self._rng, self._is_quiet = nats.world.chance(self.chance.format(stream)), is_quiet
        self._left = self._rng.choice([1, 1, 2])
        self._kinds: tuple[str, ...] = self.kinds
        self._aimed = self._rng.random() < 0.4  # at a failpoint
        self._is_due, self._copies = False, list[Any]()
        self._waiting = 0  # sources that have yet to return

    @property
    def world(self) -> World:
        return self._nats.world

    @property
    def is_over(self) -> bool:
        return not (self._left or self._waiting)

    def begin(self) -> None:
        self.world.at(self._rng.uniform(*FIRST), self._become_due)
        self._copy()

    def _copy(self) -> None:
        """Keep a copy of the stream, as a disk that is restored later."""
        if self._left and (stream := self._nats.streams.get(self._stream)) is not None:
            self._copies.append(contents(stream))
            self.world.at(COPIES_EVERY, self._copy)

    def _become_due(self) -> None:
        self._is_due = True
        if not self._aimed:
            self._change()
        else:
            self.world.at(10.0, self._change)  # if no process passes such a point

    def strike(self, point: str) -> None:
        """Change it while a process passes a failpoint, by chance."""
        if self._is_due and self._aimed and point in POINTS and self._rng.random() < 0.4:
            self.world.note(f"the source changes at {point}")
            self._change()

    def _change(self) -> None:
        if not self._is_due:
            return
        self._is_due, self._left = False, self._left - 1
        if not self._nats.is_up or self._stream not in self._nats.streams:
            self._left += 1
            self.world.at(1.0, self._become_due)
            return
        kind = self._rng.choice(self._kinds)
        self._kinds = (kind,) if self._rng.random() < 0.5 else self.kinds  # a repeated kind is judged in another way
        if self._is_allowed(kind):
            self.world.note(f"change {kind}")
            getattr(self, f"_{kind}")()
        if self._left:
            self.world.at(self._rng.uniform(*self._rng.choice(BETWEEN)), self._become_due)

    # Kinds

    def _delete(self) -> dict[str, Any]:
        stream = self._nats.streams[self._stream]
        self._changed([])
        api.answer(self._nats, ["STREAM", "DELETE", self._stream], {})
        return dict(stream.config)

    def _create(self, config: dict[str, Any]) -> None:
        """Create it once the server is up, unless it exists again."""
        if not self._nats.is_up:
            self.world.at(1.0, lambda: self._create(config))
        elif self._stream not in self._nats.streams:
            api.answer(self._nats, ["STREAM", "CREATE", self._stream], config)

    def _later(self, least: float, most: float, call: Callable[[], None]) -> None:
        self._waiting += 1

        def come() -> None:
            self._waiting -= 1
            call()

        self.world.at(self._rng.uniform(least, most), come)

    def _recreate(self) -> None:
        self._create(self._delete())

    def _remove(self) -> None:
        config = self._delete()
        self._later(1, 40, lambda: self._create(config))

    def _set_back(self) -> None:
        """Restart its server with a copy that lacks the messages of the last seconds."""
        self._put_back(self._rng.choice(self._copies[-4:]))

    def _bring_back(self) -> None:
        """Delete it, and restore it after a while as it was, or as an older copy has it."""
        disk = self._rng.choice([contents(self._nats.streams[self._stream]), self._rng.choice(self._copies)])
        config = self._delete()
        if self._rng.random() < 0.5:  # meanwhile another one has its name
            self._create(config)
        self._later(2, 45, lambda: self._put_back(disk))

    def _purge_beyond(self) -> None:
        """Purge it, and skip the next sequences."""
        stream = self._nats.streams[self._stream]
        self._changed([])
        api.answer(self._nats, ["STREAM", "PURGE", self._stream], {"seq": stream.last + self._rng.randint(2, 500)})

    def _put_back(self, disk: dict[str, Any]) -> None:
        if self._stream not in self._nats.streams:
            self._nats.streams[self._stream] = Stream(self.world, dict(disk["config"]), self._tap)
        stream = self._nats.streams[self._stream]
        was_up = self._nats.is_up
        if was_up:
            self._nats.stop()
        self._changed(list(disk["messages"].values()))
        vars(stream).update(_copied(disk))
        for consumer in stream.consumers.values():
            consumer.stream = stream
        stream.drop_batches()
        if was_up:
            self.world.at(self._rng.uniform(0.5, 5), self._nats.start)

    def _changed(self, after: list[Any]) -> None:
        stream = self._nats.streams[self._stream]
        is_owed = self._is_quiet and not self._tap.lost
        until = self.world.time_ns() - round(RECEIVED_WITHIN * NS) if is_owed else 0
        self._tap.changed(stream.messages.values(), after, until)


class Recreations(SourceChanges):
    """Changes of a small stream, which is only recreated."""

    chance, kinds = "changes/{}", ("recreate",)


def contents(stream: Stream) -> dict[str, Any]:
    """Return a copy of all that the stream holds, with its consumers."""
    found: dict[str, Any] = _copied({name: each for name, each in vars(stream).items() if name not in APART})
    return found


def _copied(value: Any) -> Any:
    """Return a deep copy of containers, and of consumers without their requests. Messages do not change."""
    if isinstance(value, Consumer):
        found = copy.copy(value)
        vars(found).update({name: _copied(each) for name, each in vars(value).items()} | {"pulls": []})
        return found
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value
