"""The sampling settings of one feed: everything that choices depend on, and its hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from common.clock import NS_PER_S
from common.settings.egress import FeedSettings

#: The version of the fold: increased when the same settings and messages would lead to other choices.
FOLD_VERSION = 1
#: Bytes of UTF-8 of the longest key; a longer one counts as no key.
MAX_KEY_BYTES = 1024
MAX_JSON_DEPTH = 500  # of objects and arrays in a payload; half of the depth that Python 3.11 can read


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of one feed. Exactly one of `field`, `header`, `subject_token` is set.

    `field`, `force_field`: dotted JSON paths, empty if not set. `subject_token`: from 1, -1 the whole subject, 0 not
    set. `duration_ns`: one message of each key passes in about this time, and a key that was silent for as long is
    unknown. `warn_ns`: a key silent for longer than this is reported; it is less than `duration_ns`. `size_trigger`:
    bytes, 0 is off. `max_age_ns`, `relay`: decide which messages reach the fold.
    """

    field: str
    header: str
    subject_token: int
    force_field: str
    duration_ns: int
    warn_ns: int
    size_trigger: int
    max_age_ns: int
    relay: bool

    @classmethod
    def from_feed(cls, feed: FeedSettings) -> SamplingSettings | None:
        """Return the settings of `feed`; None if all its messages are archived."""
        if not feed.sampling_key:
            return None
        duration = _nanoseconds(feed.inspect_duration)
        return cls(
            field=feed.inspect_field,
            header=feed.inspect_header,
            subject_token=feed.inspect_subject_token,
            force_field=feed.inspect_force_field,
            duration_ns=duration,
            warn_ns=_nanoseconds(feed.warn_duration) or duration // 2,
            size_trigger=feed.size_trigger,
            max_age_ns=_nanoseconds(feed.max_age),
            relay=feed.relay,
        )

    def to_json(self) -> dict[str, str | int | bool]:
        """Return all settings that change choices, and no others, for the footer of a segment."""
        return {
            "fold": FOLD_VERSION,
            "inspect_field": self.field,
            "inspect_header": self.header,
            "inspect_subject_token": self.subject_token,
            "inspect_force_field": self.force_field,
            "inspect_duration_ns": self.duration_ns,
            "size_trigger": self.size_trigger,
            "max_age_ns": self.max_age_ns,
            "relay": self.relay,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) of `to_json`: equal digests mean equal choices for the same messages."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NS_PER_S)
