"""Which chains come from a stream that Floe itself writes: their `Floe-*` headers are believed."""

from __future__ import annotations

from common.chain import Chain
from common.errors import Unavailable
from common.segments.documents import ChainDocument, ChainStore
from common.service.threads import Threads


class Relays:
    """What `chain.json` says of each chain, read once: it never changes."""

    def __init__(self, documents: ChainStore, threads: Threads) -> None:
        self._documents, self._threads = documents, threads
        self._known: dict[Chain, bool] = {}

    def note(self, chain: Chain, document: ChainDocument) -> None:
        """The chain's document, by whoever has read it."""
        self._known[chain] = document.relay

    async def of(self, chain: Chain) -> bool:
        """Whether the chain is a relay's.

        Never guessed: rows that are published a second time must be the same bytes. Raises Unavailable where
        there is no `chain.json`, DataError where it is spoiled, and what the store raises.
        """
        if chain not in self._known:
            document = await self._threads.run(self._documents.read_chain, chain)
            if document is None:
                raise Unavailable(f"chain {chain}: expected its chain.json, found none")
            self.note(chain, document)
        return self._known[chain]
