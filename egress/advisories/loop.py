"""Advisories that would be messages of the very stream that they tell about: each would lead to the next."""

from __future__ import annotations

from collections.abc import Sequence

from common.chain import Chain
from common.errors import Stopped
from common.jetstream.api import StreamInfo, stream_info
from common.jetstream.client import FloeClient
from common.settings.advisory_subject import EVENT
from common.settings.overlap import overlaps
from egress.advisories.event import Event
from egress.advisories.subject import filter_of
from egress.partition import Slice

CODE = "E-ADVISORY-LOOP"


def fed_back(template: str, subjects: Sequence[str], filter_subject: str) -> tuple[str, str] | None:
    """Advisories and subjects of a stream that can be the same, as filters; None where none can. Pure.

    `subjects`: what the stream takes. `filter_subject`: what is read of it, empty: all.
    """
    told = [filter_of(template.replace(EVENT, event.value)) for event in Event]
    # Filters of which every two overlap have a subject in common.
    read = [subject for subject in subjects if overlaps(subject, filter_subject)]
    for each in dict.fromkeys(told):
        for subject in read:
            if overlaps(each, subject) and overlaps(each, filter_subject):
                return each, subject
    return None


def loop_of(part: Slice, chain: Chain, info: StreamInfo) -> Stopped | None:
    """Why `part` cannot be read: the advisories of `chain` would come back with its messages."""
    template = part.settings.advisory.subject
    found = fed_back(template, info.config.get("subjects") or (), part.filter_subject) if template else None
    if found is None:
        return None
    told, subject = found
    read = f"{subject}, of which {part.filter_subject} is read" if part.filter_subject else subject
    return Stopped(
        f"{chain}: advisories on {told} would be messages of stream {info.name} itself ({read}), "
        "and each would lead to others",
        hint="set another advisory.subject, which that stream does not take, or a filter_subject that leaves "
        f"{filter_of(template)} out",
        code=CODE,
    )


def refuse_loop(part: Slice, chain: Chain, info: StreamInfo) -> None:
    """Raises Stopped where there is a loop."""
    if (loop := loop_of(part, chain, info)) is not None:
        raise loop


async def look_for_loop(part: Slice, chain: Chain, client: FloeClient) -> None:
    """As `refuse_loop`, of the stream as it is now. Asks only where there are advisories."""
    info = await stream_info(client, part.stream) if part.settings.advisory.subject else None
    if info is not None:
        refuse_loop(part, chain, info)
