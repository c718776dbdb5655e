"""Subjects of a stream that no partition takes: their messages are archived by nobody."""

from __future__ import annotations

from collections.abc import Sequence

from common.clock import Clock
from common.errors import DataError, FloeError
from common.jetstream.api import ask
from common.jetstream.client import FloeClient
from common.service.logs import get_logger
from common.service.threads import Threads
from egress.partition import Slice
from egress.partitions.left import Unmatched, unmatched
from egress.report import FeedReport

log = get_logger("egress.unmatched")

LOOK_EVERY = 600.0  # seconds
MAX_SUBJECTS = 1_000_000  # looked at; what lies behind is not counted


async def look(
    client: FloeClient,
    stream: str,
    filters: Sequence[str],
    threads: Threads,
    most: int = MAX_SUBJECTS,
    within: str = ">",
) -> Unmatched:
    """What no filter takes of the first `most` subjects of the stream that `within` takes.

    Raises Unavailable, DataError.
    """
    found, offset = Unmatched(), 0
    while offset < most:
        page = await _page(client, stream, offset, within)
        if not page:
            return found
        found = _sum(found, await threads.run(unmatched, page, filters))
        offset += len(page)
    return Unmatched(found.messages, found.subjects, found.example, is_complete=False)


async def _page(client: FloeClient, stream: str, offset: int, within: str) -> dict[str, int]:
    request = {"subjects_filter": within, "offset": offset}
    answer = await ask(client, f"STREAM.INFO.{stream}", request, timeout=30.0)
    subjects = (answer.get("state") or {}).get("subjects") or {}
    if not isinstance(subjects, dict):
        raise DataError(f"STREAM.INFO of {stream}: expected subjects, found {subjects!r:.40}")
    return subjects


def _sum(one: Unmatched, other: Unmatched) -> Unmatched:
    example = one.example or other.example
    return Unmatched(one.messages + other.messages, one.subjects + other.subjects, example)


async def watch(part: Slice, client: FloeClient, threads: Threads, report: FeedReport, clock: Clock) -> None:
    """Look now and every ten minutes, and tell `report`; until cancelled.

    Only for partition 0 of a feed that is cut into partitions: who names one filter wants no other subjects.
    """
    if part.partition or not part.settings.is_partitioned:
        return
    try:
        while True:
            try:
                report.unmatched(await look(client, part.stream, part.settings.filters(), threads))
            except FloeError as error:
                log.info("subjects not looked at", action="unmatched_put_off", error=str(error))
            await clock.sleep(LOOK_EVERY)
    finally:
        report.unmatched(Unmatched())  # whoever looks next tells
