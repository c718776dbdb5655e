"""The verdict on a run: all carried once, in order, byte for byte, and the archive accounts for every sequence."""

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from common.chain import Chain
from common.open import load_settings, open_store
from infra import oracle
from tests.scenarios.world import TARGET, World
from tests.support.basics import soon
from tests.support.ingress import client_of, count_in
from tests.support.oracle import compare_target

PREFIX = "fleet"


async def judged(world: World, site: str, config: Path, feeds: Sequence[str], *, gone: bool = False) -> int:
    """Wait until the target holds all messages of a site's streams; then compare sources, archive and target.
    Return how many messages the archive holds.

    `gone`: the sources have dropped messages that were archived before.
    """
    async with client_of(world.sites[site].url) as client:
        plain = {Chain(site, feed): await oracle.read_source_trace(client, feed) for feed in feeds}
        mapped = {
            Chain(site, feed): await oracle.read_source_trace(client, feed, oracle.prefix_subject(PREFIX))
            for feed in feeds
        }
    with closing(open_store(load_settings(str(config)))) as store:

        def is_archived() -> bool:
            ends = {chain: max((ref.coverage.last for ref in store.list(chain)), default=0) for chain in plain}
            return all(ends[chain] >= trace.last_accounted for chain, trace in plain.items())

        await soon(is_archived, every=0.3)
        found = {chain: oracle.Trace.of(oracle.archived_messages(store, chain)) for chain in plain}
        for chain, trace in plain.items():
            compared = oracle.compare(trace, found[chain], name=str(chain), may_be_gone=gone)
            assert compared.is_ok, compared.report()
            assert oracle.archive_holes(store, chain) == []
            footers = [store.footer(ref) for ref in store.list(chain)]
            assert all(footer.is_balanced() for footer in footers), footers
    count = sum(map(len, found.values()))
    async with client_of(world.central.url) as client:

        async def is_carried() -> bool:
            return await count_in(client, TARGET) >= count

        with suppress(AssertionError):  # the oracle names missing messages
            await soon(is_carried, every=0.3)
        target = await oracle.read_target_traces(client, TARGET)
    if not gone:
        compared = compare_target(mapped, target.traces, target.foreign)
        assert compared.is_ok, compared.report()
    arrived = {chain: list(trace.sequences) for chain, trace in target.traces.items()}
    assert arrived == {chain: list(trace.sequences) for chain, trace in found.items()}
    return count
