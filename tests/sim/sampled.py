"""The messages and advisories of a sampled feed, by a sampler that runs once over the publishers' log (I8)."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from common.archive.segment import Message
from common.chain import Chain
from common.settings.egress import FeedSettings
from egress.advisories.advisory import event_id, parse_advisory
from egress.sampling.keys import SamplingSettings
from egress.sampling.sampler import Sampler
from tests.sim.auditor import Broken, Publication, PublisherLog
from tests.sim.network import Link
from tests.sim.streams import StoredMessage, StreamTap
from tests.sim.world import World
from tests.support.sampling import columns_of

#: Of the few subjects most messages are left out. Each subject passes several times, and falls silent.
SAMPLING: dict[str, Any] = {
    "inspect_subject_token": -1,
    "inspect_duration": "9s",
    "warn_duration": "4s",
    "size_trigger": 95,
    "snapshot_interval": "2s",
    "advisory": {"subject": "ADVISED.%s.%v", "reliable": True},
}
#: The stream of its advisories. Its duplicate window is too short to help: an advisory sent twice is stored twice.
ADVISED = {"name": "ADVISED", "subjects": ["ADVISED.>"], "duplicate_window": 10**8}
COPY = b"Floe-Source: eu ORDERS 0000 "  # messages that claim to be returned copies are carried, and shown to no sampler
END = 10**12  # nanoseconds behind the last message, when every silence is over


class Choices(StreamTap):
    """The messages of a log that a feed sampled by `settings` carries, and its advisories, of which it gets the stored
    ones.
    """

    def __init__(self, world: World, log: PublisherLog, site: str, settings: FeedSettings) -> None:
        sampling = SamplingSettings.from_feed(settings)
        assert sampling is not None, "the feed is sampled"
        self._world, self._log, self._site, self._feed, self._sampling = world, log, site, settings.stream, sampling
        self._known: tuple[int, set[int]] = 0, set()
        self._expected, self._seen = Counter[str](), dict[str, tuple[Link | None, float]]()

    def wanted(self) -> set[int]:
        """Return the numbers of those messages."""
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
        if not name.startswith("partition "):  # another feed
            return {each.number for each in messages}
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
    def seen(self) -> int:
        return len(self._seen)

    def stored(self, message: StoredMessage) -> None:
        document = parse_advisory(message.payload)
        found = "" if document is None else document.event_id
        link, sent = self._world.arriving
        first, stored = self._seen.get(found, (None, -1.0))
        # A copy that was under way when another connection stored it came behind every lookup: only a duplicate window
        # helps.
        if not found or (found in self._seen and (link is first or sent > stored)):
            raise Broken(f"I8: advisory {found} is sent twice, or is unknown: {message.payload[:200]!r}")
        self._seen.setdefault(found, (link, self._world.now))

    def unseen(self) -> int:
        """Return the number of expected advisories that are not stored yet. Raises Broken for an unexpected one."""
        self.wanted()
        if wrong := self._seen.keys() - self._expected.keys():
            raise Broken(f"I8: {len(wrong)} advisories were told that no sampler gives, such as {sorted(wrong)[0]}")
        return len(self._expected.keys() - self._seen.keys())
