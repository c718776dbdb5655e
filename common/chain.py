"""The chain, the unit that is kept in order (`docs/concepts.md`)."""

from __future__ import annotations

import re

from msgspec import Struct, structs

SITE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
# The stream names that nats-server accepts, without characters that no key, header or log line may hold.
FEED_PATTERN = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")

MAX_INCARNATION = 9999
MAX_PARTITION = 65535  # the greatest number that a name can hold
MAX_PARTITIONS_PER_FEED = 1024  # the most into which egress divides a stream, and the most in a document
CHAIN_FORM = "SITE/FEED[/INCARNATION[/PARTITION]]"
_NUMBER = re.compile(r"[0-9]{1,5}")


class Chain(Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """One ordered history: a site, one of its feeds, an incarnation (0..9999) and a partition (0..65535).

    Raises ValueError if a part is outside its range.
    """

    site: str
    feed: str
    incarnation: int = 0
    partition: int = 0

    def __post_init__(self) -> None:
        if not SITE_PATTERN.fullmatch(self.site):
            raise ValueError(f"site {self.site!r}: expected 1 to 63 of A-Z a-z 0-9 _ -, the first not _ or -")
        if not FEED_PATTERN.fullmatch(self.feed):
            raise ValueError(f"feed {self.feed!r}: expected 1 to 255 characters without space . * > / \\")
        if not 0 <= self.incarnation <= MAX_INCARNATION:
            raise ValueError(f"incarnation {self.incarnation}: expected 0 to {MAX_INCARNATION}")
        if not 0 <= self.partition <= MAX_PARTITION:
            raise ValueError(f"partition {self.partition}: expected 0 to {MAX_PARTITION}")

    def __str__(self) -> str:
        return f"{self.site}/{self.feed}/{self.incarnation:04d}/{self.partition}"

    @classmethod
    def parse(cls, text: str) -> Chain:
        """Parse the form of `str`; `site/feed` alone means incarnation 0000, partition 0. Raises ValueError."""
        site, feed, incarnation, partition = parse_feed_parts(text)
        return cls(site, feed, incarnation or 0, partition or 0)

    def next_incarnation(self) -> Chain:
        return structs.replace(self, incarnation=self.incarnation + 1)

    def with_incarnation(self, incarnation: int) -> Chain:
        return self if incarnation == self.incarnation else structs.replace(self, incarnation=incarnation)

    def with_partition(self, partition: int) -> Chain:
        return structs.replace(self, partition=partition)

    def log_context(self) -> dict[str, object]:
        return {"site": self.site, "feed": self.feed, "incarnation": self.incarnation, "partition": self.partition}


def parse_chain_parts(text: str) -> tuple[str, str | None, int | None, int | None]:
    """Split `SITE[/FEED[/INCARNATION[/PARTITION]]]`; a part that is not named is None. Raises ValueError."""
    site, *names = text.split("/")
    feed, numbers = names[0] if names else None, names[1:]
    expected = f"chain {text!r:.80}: expected {CHAIN_FORM}, such as us-east/NODES/0000/0"
    if len(numbers) > 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise ValueError(expected)
    incarnation, partition = (*map(int, numbers), None, None)[:2]
    try:
        Chain(site, "ANY" if feed is None else feed, incarnation or 0, partition or 0)
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    return site, feed, incarnation, partition


def parse_feed_parts(text: str) -> tuple[str, str, int | None, int | None]:
    """Return the same as `parse_chain_parts`, but require the feed."""
    site, feed, incarnation, partition = parse_chain_parts(text)
    if feed is None:
        raise ValueError(f"chain {text!r:.80}: expected {CHAIN_FORM}")
    return site, feed, incarnation, partition
