"""Settings and batches for tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.segments.columns import Columns
from common.settings.egress import FeedSettings
from egress.sampling.settings import Sampling

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
START = 1_700_000_000 * SECOND


def sampling(**more: Any) -> Sampling:
    """By `sender`, hourly, with a warning after 12 minutes; `more` as keys of the configuration."""
    feed = {"stream": "S", "inspect_field": "sender", "inspect_duration": 3600.0, "warn_duration": 720.0}
    found = Sampling.of(FeedSettings.model_validate(feed | more))
    assert found is not None
    return found


def batch(messages: Sequence[tuple[int, bytes]], first: int = 1) -> Columns:
    """Messages as (time in ns, payload), with subject `s` and no headers."""
    count = len(messages)
    times, payloads = [time for time, _ in messages], [payload for _, payload in messages]
    return Columns([*range(first, first + count)], times, [b"s"] * count, [None] * count, payloads)
