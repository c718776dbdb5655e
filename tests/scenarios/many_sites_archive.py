"""The archive of `many_sites`: sixty chains of small segments, written by processes of their own.

`python -m tests.scenarios.many_sites_archive CONFIG SEED COUNT SITE…` writes COUNT segments of each chain of
those sites.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.chain import Chain
from common.open import load_settings, open_chains, open_store
from common.segments.documents import ChainDocument, StreamDocument
from common.segments.segment import Message
from infra.local.process import spawn
from infra.local.seaweedfs import SignedClient
from infra.oracle import Trace
from tests.scenarios.delivery_centre import PREFIX
from tests.scenarios.processes import ROOT
from tests.support.segments import write_segment

SITES, FEEDS = [f"site-{number:02d}" for number in range(20)], ["METRICS", "EVENTS", "AUDIT"]
CHAINS = [Chain(site, feed) for site in SITES for feed in FEEDS]
ROWS = 20  # of each segment
WRITERS = 2  # processes that fill the archive
THREADS = 4  # of each of them, and of what arrives later


def rows_of(chain: Chain, number: int, seed: int) -> list[Message]:
    """The messages of the segment `number` (from 0) of a chain: always the same."""
    rng, first = random.Random(f"{seed} {chain} {number}"), number * ROWS + 1
    return [
        Message(
            sequence,
            1_700_000_000_000_000_000 + sequence,
            f"{chain.site}.{chain.feed}.n{sequence % 10}".encode(),
            None,
            f"{chain} {sequence} ".encode() + rng.randbytes(100),
        )
        for sequence in range(first, first + ROWS)
    ]


class Putter:
    """Puts segments and tails; every segment in one request, because what is read back is not under test."""

    def __init__(self, config: Path, seed: int) -> None:
        settings = load_settings(str(config))
        store = settings.store
        self.seed = seed
        self.store, self.documents = open_store(settings), open_chains(settings)
        self._bucket = store.url.removeprefix("s3://")
        port = int(store.endpoint_url.rpartition(":")[2])
        self._client = SignedClient(port, store.access_key_id, store.secret_access_key.get_secret_value())

    def put(self, chain: Chain, number: int) -> None:
        """The segment `number` of a chain."""
        path = self.store.new_spool()
        spooled = write_segment(path, rows_of(chain, number, self.seed), chain=chain)
        key = self.store.layout.segment(spooled.segment_name)
        status, body = self._client.call("PUT", f"/{self._bucket}/{key}", path.read_bytes())
        assert status == 200, f"PUT {key}: {status} {body[:200]!r}"
        path.unlink()

    def tail(self, chain: Chain, count: int) -> None:
        """The chain's coverage ends with its first `count` segments."""
        self.documents.write_tail(chain, count * ROWS)

    def fill(self, chain: Chain, count: int) -> None:
        """A chain with so many segments."""
        self.documents.create_stream(chain, StreamDocument({"name": chain.feed}, "t0", None))
        self.documents.create_chain(chain, ChainDocument((), 1, 1))
        for number in range(count):
            self.put(chain, number)
        self.tail(chain, count)


@dataclass(slots=True)
class Archive:
    """What is put: `counts` segments of each chain."""

    config: Path
    seed: int
    counts: dict[Chain, int] = field(default_factory=lambda: dict.fromkeys(CHAINS, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def segments(self) -> int:
        """How many segments there are so far."""
        return sum(self.counts.values())

    @property
    def messages(self) -> int:
        """How many messages there are so far."""
        return self.segments * ROWS

    def expected(self) -> dict[Chain, Trace]:
        """What the target must hold of each chain."""
        return {
            chain: Trace.of(
                (row for number in range(count) for row in rows_of(chain, number, self.seed)),
                lambda subject: f"{PREFIX}.".encode() + subject,
            )
            for chain, count in self.counts.items()
        }

    def fill(self, segments: int) -> None:
        """About so many segments, the same number of each chain, by several processes."""
        count = segments // len(CHAINS)
        command = [sys.executable, "-m", __name__, str(self.config), str(self.seed), str(count)]
        writers = [spawn([*command, *SITES[n::WRITERS]], cwd=ROOT) for n in range(WRITERS)]
        codes = [writer.wait() for writer in writers]
        assert codes == [0] * WRITERS, f"writers ended with {codes}"
        self.counts = dict.fromkeys(CHAINS, count)

    def arrive(self, rng: random.Random, rate: float, seconds: float) -> None:
        """`rate` segments a second, each of a chain at random and with its tail, as egress puts them."""
        putter = Putter(self.config, self.seed)
        with ThreadPoolExecutor(THREADS) as pool:
            started, done = time.monotonic(), 0
            while (now := time.monotonic()) < started + seconds:
                wanted = min(len(CHAINS), int((now - started) * rate) - done)
                done += wanted
                list(pool.map(lambda chain: self._arrive(putter, chain), rng.sample(CHAINS, wanted)))
                time.sleep(0.1)
        putter.store.close()

    def _arrive(self, putter: Putter, chain: Chain) -> None:
        putter.put(chain, self.counts[chain])
        putter.tail(chain, self.counts[chain] + 1)
        with self._lock:
            self.counts[chain] += 1


def main(config: str, seed: str, count: str, *sites: str) -> None:
    """What this module does as a program."""
    putter = Putter(Path(config), int(seed))
    chains = [chain for chain in CHAINS if chain.site in sites]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda chain: putter.fill(chain, int(count)), chains))
    putter.store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
