"""An account whose streams are made, deleted and made again, while egress takes them by a pattern."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

from tests.sim import api
from tests.sim.actors import HEADERS, Member, Publishers
from tests.sim.auditor import Broken, SourceTap
from tests.sim.nats import SimNats
from tests.sim.store import SimObjects

PATTERN, STREAMS = "A_*", (2, 5)
MADE, LATEST = (0.0, 25.0), 45.0  # seconds until a stream is made, and until it is deleted for the last time
LIVES, AWAY = (4.0, 30.0), (0.5, 25.0)  # seconds until it is deleted, and made again
ENDS, FLEETING = 0.4, 0.2  # chances that a stream is never made again, and that it is deleted right after a burst
DOCUMENT = "$KV.FLOE_STATE.egress.account."
#: Without a copy by Floe: a stream that ends with one is a target, and no pattern takes it.
PLAIN = tuple(each for each in HEADERS if b"Floe-Source" not in (each or b""))


class Account:
    """The streams of one server that the pattern matches."""

    def __init__(self, nats: SimNats, objects: SimObjects, publishers: Publishers, site: str) -> None:
        self._nats, self._objects, self._publishers, self._site = nats, objects, publishers, site
        self.world, self._rng = nats.world, nats.world.chance("account")
        self.names = [f"A_{n}" for n in range(self._rng.randint(*STREAMS))]
        self.taps = {name: SourceTap(publishers.log) for name in self.names}
        self._under_way = 0

    @property
    def is_over(self) -> bool:
        return not self._under_way

    def begin(self) -> None:
        self._nats.taps |= self.taps
        for name in self.names:
            self._later(self._rng.uniform(*MADE), partial(self._make, name))

    def _later(self, seconds: float, call: Any) -> None:
        """Call it then, or as soon as the server is up."""
        self._under_way += 1

        def come() -> None:
            if not self._nats.is_up:
                self.world.at(0.5, come)
                return
            self._under_way -= 1
            call()

        self.world.at(seconds, come)

    def _make(self, name: str) -> None:
        api.answer(self._nats, ["STREAM", "CREATE", name], {"name": name, "subjects": [f"{name}.>"]})
        lives = self._rng.uniform(*LIVES)
        for _ in range(self._rng.choice([0, 1, 3])):
            self._later(self._rng.uniform(0, lives), partial(self._publish, name))
        if self.world.now < LATEST:
            self._later(lives, partial(self._delete, name))
        else:
            self._later(lives, partial(self._publish, name))

    def _publish(self, name: str) -> None:
        if name in self._nats.streams:
            for _ in range(self._rng.choice([1, 2, 10])):
                self._publishers.publish(self._nats, name, 0, name, PLAIN)

    def _delete(self, name: str) -> None:
        if self._rng.random() < FLEETING:
            self._publish(name)
        self.taps[name].changed(self._nats.streams[name].messages.values(), [], 0)
        api.answer(self._nats, ["STREAM", "DELETE", name], {})
        if self._rng.random() >= ENDS:
            self._later(self._rng.uniform(*AWAY), partial(self._make, name))

    # Judging

    def unnamed(self, members: Mapping[str, Member], seen: Set[int]) -> list[str]:
        """Return the archived streams that are gone and that egress does not name. Raises Broken for a wrong number."""
        known, missing = self._document(), []
        for name in self.names:
            if name in self._nats.streams or (not (end := self._end(name)) and name not in known["deleted"]):
                continue
            if (found := known["deleted"].get(name)) is not None:
                self._check(name, found, end, seen)
            elif not any(_is_gone(each, name) for each in members.values()):
                missing.append(name)
        return missing

    def _check(self, name: str, found: dict[str, Any], end: int, seen: Set[int]) -> None:
        # An empty stream that was deleted since need not have been seen.
        lost = next((each for each in reversed(self.taps[name].lost) if each), [])
        unread = sum(each.number not in seen for each in lost)
        last, left = found["last"] or 0, found["unarchived"] or 0
        # A former holder of the lease may put rows that it had received later.
        is_wrong = found["end"] > end or left != max(0, last - found["end"])
        if is_wrong or (found["end"] == end and left > unread):
            raise Broken(f"account: {name} is named with {found}; it is archived to {end}, {unread} were never read")

    def _document(self) -> dict[str, Any]:
        bucket = self._nats.streams["KV_FLOE_STATE"]
        stored = bucket.by_subject.get(f"{DOCUMENT}{self._site}".encode(), [])
        found = json.loads(bucket.messages[stored[-1]].payload) if stored else {}
        return {"feeds": [], "deleted": {}, **found}

    def _end(self, name: str) -> int:
        """Return the end of the newest incarnation in the archive; 0 if nothing of it is archived."""
        chain, keys = f"site={self._site}/feed={name}/incarnation=", "\n".join(self._objects.keys)
        newest = max(re.findall(rf"{chain}(\d+)", keys), default="")
        return max(map(int, re.findall(rf"{chain}{newest}/partition=0/level=\d/(\d+)-", keys)), default=0)


def _is_gone(member: Member, name: str) -> bool:
    part = member.health.status()["parts"].get(f"egress {name}", {}) if member.is_alive else {}
    return part.get("code") == "E-SOURCE-GONE"
