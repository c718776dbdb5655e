"""What a sampled feed carries and tells: by a sampler that runs once over the publishers' log (I8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from common.chain import Chain
from common.segments.segment import Message
from common.settings.egress import FeedSettings
from egress.advisories.advisory import event_id, parse
from egress.sampling.sampler import Sampler
from egress.sampling.settings import Sampling
from tests.sim.auditor import Broken, Publication, PublisherLog
from tests.sim.streams import StoredMessage, StreamTap
from tests.support.sampling import columns_of

#: Of the few subjects most messages are left out, and each subject passes several times, and falls silent.
SAMPLING: dict[str, Any] = {
    "inspect_subject_token": -1,
    "inspect_duration": "9s",
    "warn_duration": "4s",
    "size_trigger": 95,
    "snapshot_interval": "2s",
    "advisory": {"subject": "ADVISED.%s.%v", "reliable": True},
}
#: The stream of its advisories; too short a window to help: what is sent twice would be stored twice.
ADVISED = {"name": "ADVISED", "subjects": ["ADVISED.>"], "duplicate_window": 10**8}
COPY = b"Floe-Source: eu ORDERS 0000 "  # what claims to have come round is carried, and shown to no sampler
END = 10**12  # nanoseconds behind the last message, when every silence is over


class Choices(StreamTap):
    """The messages of a log that a feed sampled by `settings` carries, and the advisories about it, of which it sees
    those that are stored.
    """

    def __init__(self, log: PublisherLog, site: str, settings: FeedSettings) -> None:
        sampling = Sampling.of(settings)
        assert sampling is not None, "the feed is sampled"
        self._log, self._site, self._feed, self._sampling = log, site, settings.stream, sampling
        self._known: tuple[int, set[int]] = 0, set()
        self._expected, self._told = Counter[str](), Counter[str]()

    def wanted(self) -> set[int]:
        """Their numbers."""
        if self._known[0] != len(self._log.all):
            self._expected.clear()
            self._known = len(self._log.all), {number for each in self._chains() for number in self._chosen(*each)}
        return self._known[1]

    def _chains(self) -> Iterator[tuple[str, list[Publication]]]:
        chains: dict[str, list[Publication]] = defaultdict(list)
        for each in self._log.all:
            if each.sequence:
                chains[each.chain].append(each)
        yield from chains.items()

    def _chosen(self, name: str, messages: list[Publication]) -> set[int]:
        chain = Chain(self._site, self._feed, 0, int(name.split()[-1]))
        shown = [each for each in messages if not (each.sequence > 1 and COPY in (each.headers or b""))]
        rows = [Message(each.sequence, each.time_ns, each.subject, each.headers, each.payload) for each in shown]
        sampler = Sampler(self._sampling)
        choices = sampler.fold(columns_of(rows))
        advisories = [*choices.advisories, *sampler.advance(messages[-1].time_ns + END)]
        self._expected.update(event_id(chain, each) for each in advisories)
        left_out = {each.number for each, passes in zip(shown, choices.kept, strict=True) if not passes}
        return {each.number for each in messages} - left_out

    # Advisories

    @property
    def told(self) -> int:
        return len(self._told)

    def stored(self, message: StoredMessage) -> None:
        document = parse(message.payload)
        found = "" if document is None else document.event_id
        self._told[found] += 1
        if self._told[found] > 1 or not found:
            raise Broken(f"I8: advisory {found} is told twice, or none: {message.payload[:200]!r}")

    def untold(self) -> int:
        """How many advisories are not stored yet. Raises Broken for one that should not be."""
        self.wanted()
        if wrong := self._told.keys() - self._expected.keys():
            raise Broken(f"I8: {len(wrong)} advisories were told that no sampler gives, such as {sorted(wrong)[0]}")
        return len(self._expected.keys() - self._told.keys())
