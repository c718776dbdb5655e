"""What a stream of advisories tells of each node, and whether it can be true."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from common.jetstream.client import FloeClient
from common.segments.segment import Message
from infra.oracle_streams import read_stream

# What may follow on what: a node appears, falls silent, and comes back or is forgotten.
FOLLOWS = {
    "": {"new"},
    "new": {"timeout"},
    "timeout": {"recover", "expire"},
    "recover": {"timeout"},
    "expire": {"new"},
}
MAX_PROBLEMS = 5


@dataclass(slots=True)
class Stories:
    """The advisories of one stream. `counts`: by event; `problems`: what cannot be true, a few lines."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _last: dict[str, str] = field(default_factory=dict)
    _ids: set[str] = field(default_factory=set)

    def take(self, message: Message) -> None:
        """Note one advisory."""
        document = json.loads(message.payload)
        event, value, identity = document["event"], document["value"], document["event_id"]
        before, self._last[value] = self._last.get(value, ""), event
        self.counts[event] += 1
        if event not in FOLLOWS[before]:
            self._note(f"{value}: {event} after {before or 'nothing'}")
        if identity in self._ids:
            self._note(f"{value}: {event} twice under one id")
        self._ids.add(identity)

    def _note(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


async def stories(client: FloeClient, stream: str) -> Stories:
    """Read all advisories of the stream."""
    told = Stories()
    await read_stream(client, stream, told.take)
    return told
