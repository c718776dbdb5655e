"""Fair turns, holes at the edges, and hints that lie: a prefetcher over a real archive, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.segments.documents import AcceptedGap, ChainDocument
from common.sequences import SequenceRange
from common.service.process import Threads
from common.settings.ingress import TargetSettings
from common.tasks import Stop
from ingress.chains.chain_state import ChainRegistry, Turn
from ingress.chains.prefetch import Prefetcher
from ingress.chains.search import look
from ingress.checkpoint import Gap, advanced
from ingress.rows.prepare import Accepting, TargetLimits
from tests.support.basics import PATIENCE, soon
from tests.support.ingress import CHAIN, Archive, rows_of

LATER = CHAIN.next_incarnation()
PARTS = [CHAIN, Chain("us-east", "NODES", 0, 1)]
BIG = Chain("big", "NODES")
SMALL = [Chain(f"s{n}", "NODES") for n in range(9)]


class Centre:
    """Takes what a prefetcher has ready and remembers it as stored."""

    def __init__(self, archive: Archive, memory: int = 1 << 28, **source: Any) -> None:
        sites = ["us-east", BIG.site, *(chain.site for chain in SMALL)]
        entry = {"site": sites, "feed": "NODES", **source}
        settings = TargetSettings.model_validate({"stream": "FLEET", "sources": [entry]})
        registry = ChainRegistry(settings, TargetLimits(Accepting([">"]), 1 << 20))
        self.threads = Threads("test", 4)
        self.archive, self.stored = archive, dict[Chain, int]()
        self.order: list[tuple[Chain, int]] = []  # messages by chain, block by block
        self.prefetcher = Prefetcher(registry, archive.store, archive.documents, self.threads, SystemClock(), memory)

    @asynccontextmanager
    async def running(self, *, is_known: bool = True) -> AsyncIterator[Centre]:
        if is_known:
            self.prefetcher.reset(self.stored)
        tasks = [asyncio.create_task(self.prefetcher.run()), asyncio.create_task(self._carry())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.threads.idle()
            self.threads.close()

    async def _carry(self) -> None:
        while True:
            if (rows := await self.prefetcher.take(Stop(), 1.0)) is None:
                continue
            self.stored = advanced(self.stored, rows.pieces())
            self.order += [
                (block.piece.chain, block.piece.count)
                for block in rows.blocks
                if not isinstance(block.piece.segment, Gap)
            ]
            self.prefetcher.release(rows)
            self.prefetcher.closed(self.stored)
            await asyncio.sleep(0)

    async def look(self) -> None:
        """What discovery does: the tails that are there, then a tick."""
        for chain in self.archive.documents.chains():
            self.prefetcher.found(chain, self.archive.documents.read_tail(chain))
        await self.prefetcher.tick()

    async def reaches(self, positions: Mapping[Chain, int], seconds: float = PATIENCE) -> None:
        async def there() -> bool:
            await self.look()
            return all(self.stored.get(chain) == at for chain, at in positions.items())

        await soon(there, seconds, every=0.05)


@pytest.mark.parametrize("memory", [1 << 28, 1 << 20], ids=["roomy", "short"])
async def test_one_chain_with_a_hundred_times_the_rows_starves_nobody(archive: Archive, memory: int) -> None:
    for first in range(1, 20_001, 1000):
        archive.put(rows_of(first, first + 999, BIG), chain=BIG)
    for chain in SMALL:
        archive.put(rows_of(1, 200, chain), chain=chain)
    async with Centre(archive, memory).running() as centre:
        await centre.reaches({BIG: 20_001, **dict.fromkeys(SMALL, 201)})

    last = max(index for index, (chain, _) in enumerate(centre.order) if chain != BIG)
    before = sum(count for chain, count in centre.order[:last] if chain == BIG)
    # Three chains are read at a time: nine small ones are through after about five turns of the big one, or a few more
    # where threads are slow; one that starved would be through after about twenty.
    assert before <= 15_000, before


async def test_a_hole_at_the_very_beginning_waits_and_is_passed_once_it_is_accepted(archive: Archive) -> None:
    archive.begin()
    archive.put(rows_of(11, 20))
    async with Centre(archive).running() as centre:
        await centre.look()
        await soon(lambda: centre.prefetcher.chains.get(CHAIN).plan.hole == SequenceRange(1, 10))
        archive.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(1, 10)))
        await centre.reaches({CHAIN: 21})
    assert centre.order == [(CHAIN, 10)]


async def test_the_end_of_an_incarnation_that_never_arrives_is_lost_and_the_next_one_begins(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.begin(LATER, previous={0: 20})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    patient, hasty = Centre(archive), Centre(archive, lost_segment_timeout="1s", on_lost="skip")
    async with patient.running():
        await patient.reaches({CHAIN: 11})
        await soon(lambda: patient.prefetcher.chains.get(CHAIN).plan.hole == SequenceRange(11, 20))
        assert LATER not in patient.stored
    async with hasty.running():
        await hasty.reaches({CHAIN: 21, LATER: 6})


async def test_partitions_that_end_at_different_times_hold_the_next_incarnation_back(archive: Archive) -> None:
    archive.begin(LATER, previous={0: 10, 1: 30})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    archive.put(rows_of(1, 15, PARTS[0]), chain=PARTS[0])
    archive.put(rows_of(1, 20, PARTS[1]), chain=PARTS[1])
    async with Centre(archive).running() as centre:
        await centre.reaches({PARTS[0]: 11, PARTS[1]: 21})
        await centre.look()
        assert LATER not in centre.stored
        archive.put(rows_of(21, 40, PARTS[1]), chain=PARTS[1])
        await centre.reaches({PARTS[0]: 11, PARTS[1]: 31, LATER: 6})


@pytest.mark.parametrize("tail", [b"", b"{", b'{"format_version":1,"end":3}', b'{"format_version":1,"end":999}', None])
async def test_a_tail_that_is_lost_stale_or_spoiled_costs_time_only(archive: Archive, tail: bytes | None) -> None:
    archive.put(rows_of(1, 10))
    key = archive.store.layout.tail(CHAIN)
    archive.objects.delete(key) if tail is None else archive.objects.put(key, tail)
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 11})
        archive.put(rows_of(11, 20), tail=False)
        await centre.reaches({CHAIN: 21})


async def test_a_wide_segment_behind_a_page_of_others_is_carried_and_its_accepted_gap_is_not_passed(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.chains.locate.look", lambda *args, search, **more: look(*args, **more))
    archive.begin()
    for sequence in range(11, 131):
        archive.put(rows_of(sequence, sequence), tail=False)
    archive.put(rows_of(1, 130))
    archive.documents.accept_gap(CHAIN, AcceptedGap(SequenceRange(1, 10)))
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 131})
    assert sum(count for _, count in centre.order) == 130
    assert archive.documents.passed_gaps("FLEET", CHAIN) == []


async def test_a_chain_that_begins_at_a_moment_to_come_says_what_it_waits_for(archive: Archive) -> None:
    archive.put(rows_of(1, 20))
    centre = Centre(archive, start_time="2100-01-01T00:00:00Z")
    async with centre.running():
        await centre.look()
        chain = centre.prefetcher.chains.get(CHAIN)
        await soon(lambda: "nothing is archived yet from the moment on" in chain.waits_for)

    assert not chain.has_begun
    assert centre.stored == {}


async def test_partitions_that_never_were_stop_the_incarnation_that_names_them_in_one_line(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.put(rows_of(1, 20, SMALL[0]), chain=SMALL[0])
    archive.begin(LATER, previous={0: 10, 1: 0, **dict.fromkeys(range(2, 1024), 5)})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 11, SMALL[0]: 21})
        await soon(lambda: centre.prefetcher.chains.get(LATER).stopped is not None)

    error = centre.prefetcher.chains.get(LATER).stopped
    assert error.code == "E-STATE-JSON"
    assert error.message.endswith("that have a chain.json, found 2, 3, 4, 5, 6 and 1017 more without one")
    assert len(error.message) < 300
    assert error.hint.endswith("--incarnation 1 --partition 0 --sequence 1 --yes")
    assert LATER not in centre.stored


async def test_partitions_that_are_found_late_are_waited_for(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    archive.begin(LATER, previous={0: 10, 1: 3})
    archive.put(rows_of(1, 5, LATER), chain=LATER)
    archive.put(rows_of(1, 3, PARTS[1]), chain=PARTS[1])
    async with Centre(archive).running() as centre:
        for chain in (CHAIN, LATER):  # a listing that was made before the partition was there
            centre.prefetcher.found(chain)
        await centre.prefetcher.tick()
        await soon(lambda: PARTS[1] in {state.chain for state in centre.prefetcher.chains})
        assert centre.prefetcher.chains.get(LATER).stopped is None
        await centre.reaches({CHAIN: 11, PARTS[1]: 4, LATER: 6})


async def test_a_partition_above_the_count_of_its_chain_json_stops_alone(archive: Archive) -> None:
    archive.put(rows_of(1, 10))
    forged = Chain("us-east", "NODES", 0, 7)
    archive.documents.create_chain(forged, ChainDocument((), 7, 1))
    archive.put(rows_of(1, 5, forged), chain=forged)
    async with Centre(archive).running() as centre:
        await centre.reaches({CHAIN: 11})
        await soon(lambda: centre.prefetcher.chains.get(forged).stopped is not None)

    error = centre.prefetcher.chains.get(forged).stopped
    assert (error.code, error.message.endswith("expected more than 7, found 7")) == ("E-STATE-JSON", True)
    assert forged not in centre.stored


async def test_a_feed_with_too_many_chains_stops_and_the_others_are_carried(archive: Archive) -> None:
    crowd = [Chain(BIG.site, BIG.feed, 0, partition) for partition in range(6)]
    for chain in (*crowd, *SMALL):
        archive.put(rows_of(1, 5, chain), chain=chain)
    async with Centre(archive, max_chains=4).running() as centre:
        await centre.reaches(dict.fromkeys(SMALL, 6))
        chains = centre.prefetcher.chains
        await soon(lambda: sum(state.stopped is not None for state in chains) == 4)

    assert {state.stopped.code for state in chains if state.stopped} == {"E-CHAINS"}
    assert not centre.stored.keys() & set(crowd)


async def test_documents_of_one_site_hold_up_no_other(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile, go_on, waited = BIG.next_incarnation(), threading.Event(), threading.Event()
    archive.put(rows_of(1, 5, BIG), chain=BIG)
    archive.begin(hostile, previous={0: 5})
    archive.put(rows_of(1, 5, hostile), chain=hostile)
    for chain in SMALL:
        archive.put(rows_of(1, 5, chain), chain=chain)
    real = archive.documents.read_stream

    def read(chain: Chain) -> Any:
        if chain.site == BIG.site and not go_on.wait(PATIENCE):
            waited.set()
        return real(chain)

    monkeypatch.setattr(archive.documents, "read_stream", read)
    async with Centre(archive).running() as centre:
        await centre.reaches(dict.fromkeys(SMALL, 6))
        assert not waited.is_set()
        assert not centre.stored.keys() & {BIG, hostile}  # their ends are not known yet
        go_on.set()
        await centre.reaches({BIG: 6, hostile: 6})


async def test_a_feed_that_is_idle_when_it_gets_too_many_chains_is_shown_as_stopped(archive: Archive) -> None:
    archive.put(rows_of(1, 5))
    async with Centre(archive, max_chains=1).running() as centre:
        await centre.reaches({CHAIN: 6})
        archive.put(rows_of(1, 5, PARTS[1]), chain=PARTS[1])
        await centre.look()
        await soon(lambda: getattr(centre.prefetcher.chains.get(CHAIN).stopped, "code", "") == "E-CHAINS")
    assert centre.stored == {CHAIN: 6}


async def test_a_chain_that_waits_for_others_gets_no_turn_before_they_have_ended(archive: Archive) -> None:
    """A thousand that wait would take a thousand turns for each intent that is closed."""
    prefetcher = Centre(archive).prefetcher
    prefetcher.reset({})
    for chain in (CHAIN, LATER):
        prefetcher.found(chain)
    prefetcher.chains.set_previous(LATER, {0: 10})
    state = prefetcher.chains.get(LATER)
    state.waits_for = prefetcher.chains.obstacle(LATER)

    prefetcher.closed({CHAIN: 5})
    assert (state.turn, state.waits_for != "") == (Turn.NONE, True)
    prefetcher.closed({CHAIN: 11})
    assert state.turn is Turn.QUEUED
