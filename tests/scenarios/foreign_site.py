"""Must hold: a site that writes under another site's name is refused and reported; the others go on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.chain import Chain
from common.objects.port import ObjectStore
from common.open import load_settings, open_chains, open_store
from common.segments.documents import ChainDocument, ChainStore, StreamDocument
from common.segments.keys import DIGEST_LENGTH, SegmentName
from common.segments.segment import Message
from common.segments.store import SegmentStore
from common.sequences import SequenceRange
from infra.oracle import Trace, prefixed
from tests.scenarios.delivery import store_of
from tests.scenarios.delivery_centre import PREFIX
from tests.scenarios.delivery_meter import peak_memory, scrape, until, value
from tests.scenarios.delivery_writer import Author, Writer
from tests.scenarios.single_centre import SingleCentre, single_centre
from tests.support.basics import PATIENCE
from tests.support.oracle import classes
from tests.support.segments import footer_of, forge, message, table_of, write_segment

FEED, EVIL = "NODES", "evil"  # the site `evil` may not flow into the target
GOOD = [Chain("alpha", FEED), Chain("gamma", FEED)]
VICTIM = Chain("delta", FEED)
ROWS = 100  # of each segment of the victim
MEMORY = 300 * 2**20  # bytes that ingress may use, whatever is in the bucket


async def foreign_site(s3: Any, rng: random.Random, seconds: float, publisher: str = "auto") -> dict[str, Any]:
    """Rounds of hostile objects for `seconds`. Raises AssertionError where any of them does anything."""
    started, store = time.monotonic(), store_of(s3)
    sites = [chain.site for chain in (*GOOD, VICTIM)]
    async with single_centre(store, sites, [FEED], publisher=publisher) as at:
        settings = load_settings(str(at.config))
        segments, documents = open_store(settings), open_chains(settings)
        authors = [Author(segments, documents, c, random.Random(rng.random()), prefixed(PREFIX)) for c in GOOD]
        victim = Victim(segments, documents, rng)
        at.instances[0].service.start()
        await asyncio.to_thread(victim.begin)
        # Whoever may overwrite what was not carried yet has destroyed it: names are revived behind that.
        assert await at.arrived(ROWS, PATIENCE), "nothing was ever carried"
        with Writer(authors, random.Random(rng.random()), 200) as writer:
            while True:
                await _round(at, victim, writer)
                if time.monotonic() > started + seconds:
                    break
        expected = {**writer.expected, VICTIM: victim.expected}
        compared = await at.judge(expected)
        memory = peak_memory(at.instances[0].service.pid)
        found = {**victim.counts, **classes(compared), "messages": compared.expected, "peak bytes": memory}
        assert compared.ok, f"{compared.report()}\n{found}"
        assert memory <= MEMORY, f"expected at most {MEMORY} bytes, found {memory}"
        await at.drain()
        segments.close()
    return {**found, "seconds": round(time.monotonic() - started, 1)}


async def _round(at: SingleCentre, victim: Victim, writer: Writer) -> None:
    """Hostile objects where the victim goes on, then what really belongs there."""
    before = sum(len(author.expected) for author in writer.authors)
    hostile = await asyncio.to_thread(victim.attack)
    log = at.instances[0].service.log

    def unreported() -> set[str]:
        text = log.read_text(errors="replace")
        return {key for key in hostile if not _is_reported(text, key)}

    assert await until(lambda: not unreported(), PATIENCE), f"not reported: {unreported()}"
    victim.counts["hostile segments reported"] += len(hostile)
    await asyncio.to_thread(_check_metrics, at, victim)
    # Others have gone on meanwhile: what the writer had made before the attack has arrived.
    assert await at.arrived(before + len(victim.expected), PATIENCE), "the others do not go on"
    await asyncio.to_thread(victim.go_on)
    carried = sum(len(author.expected) for author in writer.authors) + len(victim.expected)
    assert await at.arrived(carried, PATIENCE), "the victim does not go on behind what was hostile"


def _is_reported(log: str, key: str) -> bool:
    return any('"segment_damaged"' in line and key in line for line in log.splitlines())


def _check_metrics(at: SingleCentre, victim: Victim) -> None:
    samples = scrape(at.instances[0].monitor, 5.0)
    counted = value(samples, "floe_ingress_damaged_segments_total", f'site="{VICTIM.site}"')
    reported = victim.counts["hostile segments reported"]
    assert counted >= reported, f"floe_ingress_damaged_segments_total: {counted}, reported {reported}"


class Victim:
    """A chain whose site is honest, and what `evil` writes in its name. `expected`: what is its own."""

    def __init__(self, store: SegmentStore, documents: ChainStore, rng: random.Random) -> None:
        self.expected, self.counts = Trace(), Counter[str]()
        self._store, self._documents, self._rng = store, documents, rng
        self._objects: ObjectStore = store.objects
        self._next = 1
        self._revived: list[tuple[str, bytes]] = []

    def begin(self) -> None:
        """The chain with one good segment; and the chains of `evil`, under its own and other names."""
        self._documents.create_stream(VICTIM, StreamDocument({"name": FEED}, "t0", None))
        self._documents.create_chain(VICTIM, ChainDocument((), 1, 1))
        self.go_on()
        own = Chain(EVIL, FEED)
        self._documents.create_stream(own, StreamDocument({"name": FEED}, "t0", None))
        self._documents.create_chain(own, ChainDocument((), 1, 1))
        self._store.put(write_segment(self._store.new_spool(), rows_of(1, ROWS), chain=own))
        self._documents.write_tail(own, ROWS)
        for chain in (Chain("alpha", FEED, 1), Chain("gamma", FEED, 0, 7), Chain(VICTIM.site, "OTHER")):
            self._forge_chain(chain)

    def _forge_chain(self, chain: Chain) -> None:
        """A chain that its site never wrote: documents that are none, a tail, a segment of `evil`."""
        if chain.partition == 0:  # else it is that of the honest partition
            self._objects.put(self._documents.layout.stream_document(chain), b'{"previous": "all"}')
        self._objects.put(self._documents.layout.chain_document(chain), b"\xff not JSON")
        self._documents.write_tail(chain, ROWS)
        for name, body in self._hostile(chain, 1).values():
            self._put(name, body)
        self.counts["forged chains"] += 1

    def attack(self) -> list[str]:
        """Put every kind of hostile segment where the chain goes on, and forge tails; the segments' keys."""
        self._forge_tails()
        for key, body in self._revived:
            self._objects.put(key, self._rng.choice([body, body[:-9], b"other bytes"]))
            self.counts["names revived"] += 1
        made = list(self._hostile(VICTIM, self._next).items())
        self._rng.shuffle(made)
        keys = []
        for kind, (name, body) in made:
            keys.append(self._put(name, body))
            self.counts[kind] += 1
        return keys

    def go_on(self) -> None:
        """What really comes next: a good segment and an honest tail."""
        rows = rows_of(self._next, self._next + ROWS - 1)
        for row in rows:
            self.expected.add(row, f"{PREFIX}.".encode() + row.subject)
        spooled = write_segment(self._store.new_spool(), rows, chain=VICTIM)
        ref = self._store.put(spooled)
        self._revived.append((ref.key, spooled.path.read_bytes()))
        self._next += ROWS
        self._documents.write_tail(VICTIM, self._next - 1)

    def _put(self, name: SegmentName, body: bytes) -> str:
        key = self._store.layout.segment(name)
        self._objects.put(key, body)
        return key

    def _forge_tails(self) -> None:
        layout = self._documents.layout
        for chain in (VICTIM, *GOOD):
            forged = [b"", b"\xff", b'{"end": -1}', b'{"end": "x"}', b"[" * 100_000, b"x" * (2 << 20)]
            forged.append(json.dumps({"end": 2**62}).encode())
            self._objects.put(layout.tail(chain), self._rng.choice(forged))
            self.counts["forged tails"] += 1
        self._documents.write_tail(VICTIM, 2**62)

    def _hostile(self, chain: Chain, first: int) -> dict[str, tuple[SegmentName, bytes]]:
        """One of each kind for the rows from `first` on: what its name says, and its bytes."""
        rows, coverage = rows_of(first, first + ROWS - 1, b"hostile"), SequenceRange(first, first + ROWS - 1)
        far = SequenceRange(first, first + 10**6)
        good = self._written(rows, chain=chain)
        return {
            "footer of another site": _named(chain, coverage, self._written(rows, chain=Chain(EVIL, FEED))),
            "footer of another site, reaching far": _named(
                chain, far, self._written(rows, far, chain=Chain(EVIL, FEED))
            ),
            "footer of another feed": _named(chain, coverage, self._written(rows, chain=Chain(chain.site, "FEED2"))),
            "footer of another coverage": _named(chain, far, good),
            "footer of another level": _named(chain, coverage, good, level=3),
            "other bytes than its name": (SegmentName(chain, 0, coverage, "0" * DIGEST_LENGTH), good),
            "cut off": _named(chain, coverage, good[: len(good) // 2]),
            "a web page": _named(chain, coverage, b"<html>please log in</html>"),
            "empty object": _named(chain, coverage, b""),
            "wrong columns": _named(chain, coverage, self._forged(pa.table({"a": [first]}), rows, chain)),
            "rows out of order": _named(chain, coverage, self._forged(table_of(rows[::-1]), rows, chain)),
            "rows of other sequences": _named(
                chain, coverage, self._forged(table_of(rows_of(first + 7, first + ROWS + 6)), rows, chain)
            ),
            "no footer": _named(chain, coverage, self._forged(table_of(rows), None, chain)),
            "bomb": _named(chain, coverage, self._forged(_bomb(rows), rows, chain)),
        }

    def _written(self, rows: Sequence[Message], coverage: SequenceRange | None = None, **fields: Any) -> bytes:
        return _bytes(write_segment(self._store.new_spool(), rows, coverage, **fields).path)

    def _forged(self, table: pa.Table, rows: Sequence[Message] | None, chain: Chain) -> bytes:
        path = self._store.new_spool()
        options: dict[str, Any] = {"use_dictionary": ["payload"], "dictionary_pagesize_limit": 2**30}
        if "payload" not in table.schema.names or not pa.types.is_dictionary(table.schema.field("payload").type):
            options = {}
        forge(path, table, footer_of(rows, chain=chain) if rows else None, **options)
        return _bytes(path)


def rows_of(first: int, last: int, payload: bytes = b"honest") -> list[Message]:
    """Messages of all sequences first..last of the victim."""
    return [message(s, b"%b %d" % (payload, s), subject=b"delta.n%d" % (s % 9)) for s in range(first, last + 1)]


def _bomb(rows: Sequence[Message]) -> pa.Table:
    """A file of some kilobytes that decodes to a gigabyte: all rows share one payload of 10 MiB."""
    table = table_of(rows)
    index = table.schema.get_field_index("payload")
    shared = pa.array([b"\0" * (10 << 20)], pa.binary()).cast(table.schema.field(index).type)
    values = pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), shared)
    return table.set_column(index, pa.field("payload", values.type, table.schema.field(index).nullable), values)


def _named(chain: Chain, coverage: SequenceRange, body: bytes, level: int = 0) -> tuple[SegmentName, bytes]:
    """The bytes under a name that promises these very bytes."""
    return SegmentName(chain, level, coverage, hashlib.sha256(body).hexdigest()[:DIGEST_LENGTH]), body


def _bytes(path: Path) -> bytes:
    body = path.read_bytes()
    path.unlink()
    return body
