"""The messages that a sampled feed carries: choices of a sampler that runs once over the publishers' log (I8)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from common.segments.segment import Message
from common.settings.egress import FeedSettings
from egress.sampling.sampler import Sampler
from egress.sampling.settings import Sampling
from tests.sim.auditor import Publication, PublisherLog
from tests.support.sampling import columns_of

#: Of the few subjects most messages are left out, and each subject passes several times.
SAMPLING: dict[str, Any] = {"inspect_subject_token": -1, "inspect_duration": "9s", "size_trigger": 95}
SNAPSHOTS: dict[str, Any] = {"snapshot_interval": "2s"}
COPY = b"Floe-Source: eu ORDERS 0000 "  # what claims to have come round is carried, and shown to no sampler


class Choices:
    """The messages of a log that a feed sampled by `settings` carries."""

    def __init__(self, log: PublisherLog, settings: FeedSettings) -> None:
        sampling = Sampling.of(settings)
        assert sampling is not None, "the feed is sampled"
        self._log, self._sampling = log, sampling
        self._known: tuple[int, set[int]] = 0, set()

    def wanted(self) -> set[int]:
        """Their numbers."""
        if self._known[0] != len(self._log.all):
            self._known = len(self._log.all), self._chosen()
        return self._known[1]

    def _chosen(self) -> set[int]:
        chains: dict[str, list[Publication]] = defaultdict(list)
        for each in self._log.all:
            if each.sequence:
                chains[each.chain].append(each)
        found = set[int]()
        for messages in chains.values():
            shown = [each for each in messages if not (each.sequence > 1 and COPY in (each.headers or b""))]
            rows = [Message(each.sequence, each.time_ns, each.subject, each.headers, each.payload) for each in shown]
            kept = Sampler(self._sampling, tracks=False).fold(columns_of(rows)).kept
            left_out = {each.number for each, passes in zip(shown, kept, strict=True) if not passes}
            found |= {each.number for each in messages} - left_out
        return found
