"""The stages of a session, made from a feed's settings: draft, builder, and where received messages go."""

from __future__ import annotations

from collections.abc import Callable

from common.chain import Chain
from common.clock import NS_PER_S, Clock
from egress.builder import Builder, Closing, Emitted
from egress.deps import Parts
from egress.draft import Draft
from egress.identity import Source
from egress.memory import Account
from egress.partition import Slice
from egress.position import Position
from egress.reader import Target
from egress.sampling.filters import Sieve
from egress.sampling.intake import Sifting
from egress.sampling.settings import Sampling
from egress.sampling.stage import Sampled


def make_draft(parts: Parts, part: Slice, chain: Chain) -> Draft:
    """The next segment of `chain`."""
    return Draft(
        chain,
        parts.store.new_spool,
        writer=parts.writer,
        compression_level=part.settings.segment.compression_level,
        filtered=bool(part.filter_subject),
        sampling=Sampling.of(part.settings),
        subject_statistics=parts.store.subject_statistics,
    )


def make_builder(
    part: Slice,
    clock: Clock,
    account: Account,
    emit: Callable[[Emitted], None],
    place: Position,
    hurry: float | None,
) -> Builder:
    """What builds segments from `place` on."""
    segment = part.settings.segment
    return Builder(
        Closing(segment.max_messages, segment.max_size, segment.max_age),
        clock,
        account,
        emit,
        first=place.first,
        until=place.until,
        sampled=bool(part.settings.sampling_key),
        hurry=hurry,
    )


def make_target(part: Slice, source: Source, builder: Builder, sampled: Sampled | None) -> Target:
    """Where received messages go: to the builder, through a sieve where some may be left out."""
    feed = part.settings
    if sampled is not None:
        return sampled.target
    if not (feed.max_age or feed.relay):
        return builder
    keep_ns = round(feed.max_age * NS_PER_S)
    newest_ns = source.last_timestamp_ns or 0
    return Sifting(builder, Sieve(part.site, relay=feed.relay, keep_ns=keep_ns, newest_ns=newest_ns))
