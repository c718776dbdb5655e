"""Who is silent, as the centre sees it while the store comes and goes; and when egress says that it lives."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.chain import Chain
from common.clock import SystemClock
from common.errors import Unavailable
from common.objects.local import LocalObjects
from common.segments.alive import Alive, ChainSign
from common.segments.documents import ChainStore
from common.segments.keys import Layout
from common.service.process import Threads
from common.tasks import Stop
from egress.deps import EgressTuning, Tuning
from egress.heartbeats import SignOfLife
from ingress.discovery.sites import Sites
from tests.support.basics import soon
from tests.support.clock import ManualClock
from tests.support.stores import FaultyStore

CHAIN = Chain("us-east", "NODES")
PAIRS = frozenset({(CHAIN.site, CHAIN.feed)})


def away(*_args: Any, **_kwargs: Any) -> Any:
    raise Unavailable("away")


async def test_while_the_store_is_away_nobody_becomes_silent_and_the_dead_stay_so(tmp_path: Path) -> None:
    store, clock = FaultyStore(LocalObjects(tmp_path)), ManualClock(time.time())
    documents = ChainStore(store, Layout(""))  # type: ignore[arg-type]
    documents.write_alive("host", Alive(CHAIN.site, "o", 0.0, (ChainSign("reading", 0.0, chain=CHAIN),)))
    sites = Sites(documents, Threads("test", 1), clock, 300.0)
    is_away = False
    store.on("list", lambda real, *args, **kwargs: (away if is_away else real)(*args, **kwargs))

    async def look(seconds: float) -> bool:
        clock.advance(seconds)
        await sites.look(PAIRS)
        sighting = sites.of(CHAIN)
        assert sighting is not None
        return sites.is_silent(sighting)

    assert not await look(0)
    assert not await look(60)
    is_away = True
    for _ in range(10):
        with pytest.raises(Unavailable):
            await look(60)
    is_away = False
    assert not await look(60), "nobody could put anything there"
    assert not await look(120)
    assert await look(120), "it stays away while the store answers"
    is_away = True
    with pytest.raises(Unavailable):
        await look(60)
    is_away = False
    assert await look(60)


async def test_a_store_that_hangs_is_told_and_its_time_makes_nobody_silent(tmp_path: Path) -> None:
    store, clock = FaultyStore(LocalObjects(tmp_path)), ManualClock(time.time())
    documents = ChainStore(store, Layout(""))  # type: ignore[arg-type]
    documents.write_alive("host", Alive(CHAIN.site, "o", 0.0, (ChainSign("reading", 0.0, chain=CHAIN),)))
    sites = Sites(documents, Threads("test", 1), clock, 300.0)
    await sites.look(PAIRS)

    def hang(*_args: Any, **_kwargs: Any) -> Any:
        clock.advance(400)
        raise Unavailable("no answer")

    store.on("list", hang)
    with pytest.raises(Unavailable):
        await sites.look(PAIRS)
    store.heal()
    await sites.look(PAIRS)
    sighting = sites.of(CHAIN)
    assert sighting is not None
    assert not sites.is_silent(sighting)


async def test_a_sign_of_life_without_an_answer_is_told(tmp_path: Path) -> None:
    go, told = threading.Event(), list[bool]()
    store = FaultyStore(LocalObjects(tmp_path)).on("put", lambda *_args, **_kwargs: go.wait(), nth=1)
    documents = ChainStore(store, Layout(""))  # type: ignore[arg-type]
    deps: Any = SimpleNamespace(chains=documents, clock=SystemClock(), tuning=Tuning(pace=EgressTuning(alive=0.6)))
    tell = partial(told.append, False)
    sign = SignOfLife(CHAIN.site, "host", "o", (), deps, None, tell)  # type: ignore[arg-type]
    stop = Stop()
    running = asyncio.create_task(sign.run(stop))
    await soon(lambda: told == [False])
    go.set()
    await soon(lambda: len(documents.listed_alive()) == 1)
    stop.set()
    await running


async def test_a_sign_of_life_that_could_not_be_put_is_put_soon(tmp_path: Path) -> None:
    store = FaultyStore(LocalObjects(tmp_path)).on("put", away, nth=1)
    documents = ChainStore(store, Layout(""))  # type: ignore[arg-type]
    tuning = Tuning(pace=EgressTuning(alive=12.0))
    deps: Any = SimpleNamespace(chains=documents, clock=SystemClock(), tuning=tuning)
    sign = SignOfLife(CHAIN.site, "host", "o", (), deps, None)  # type: ignore[arg-type]
    stop = Stop()
    running = asyncio.create_task(sign.run(stop))
    await soon(lambda: len(documents.listed_alive()) == 1)
    stop.set()
    await running


async def test_a_site_with_thousands_of_signs_of_life_makes_nobody_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingress.discovery.sites.MOST_READ", 8)
    documents, clock, threads = (
        ChainStore(LocalObjects(tmp_path), Layout("data")),
        ManualClock(time.time()),
        Threads("t", 2),
    )
    sites = Sites(documents, threads, clock, 300.0)
    pairs = {(CHAIN.site, CHAIN.feed), ("a-site", "NODES")}
    for turn in range(5):
        for number in range(40):
            documents.write_alive(f"p{number}", Alive("a-site", "o", turn, ()))
        documents.write_alive(
            "host", Alive(CHAIN.site, "o", turn, (ChainSign(state="reading", since=turn, chain=CHAIN),))
        )
        await sites.look(pairs)
        sighting = sites.of(CHAIN)
        assert sighting is not None
        assert sighting.time == turn
    threads.close()
