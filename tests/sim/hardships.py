"""Hardships: servers and stores with which Floe once failed, and a hostile site. At most one of them is in a world."""

import re
from collections.abc import Callable
from functools import partial

from common.errors import FloeError
from common.objects.port import ObjectInfo
from common.objects.s3_errors import answer_error
from tests.sim.nats import SimNats
from tests.sim.store import SimObjects, StoreMood

#: Answers that mean "later", under any name that a store has for it.
LATER = (
    (429, "TooManyRequests"), (429, "SomethingOfItsOwn"), (409, "ConcurrentModification"), (408, ""), (425, "TooEarly"),
    (503, "SlowDown"), (500, ""), (400, "RequestExpired"), (400, "KMS.ThrottlingException"),
)  # fmt: skip
SMALL_BATCH = 20  # messages that a server gives to one request
BUSY = 18.0  # seconds from the start in which a store answers "later"
LOST = 6.0, 30.0  # seconds within which a bucket is set back
HOSTILE_SITE, HOSTILE_FOR = "evil", 40.0  # seconds in which it writes


class Hardship:
    """One of HARDSHIPS: a store that is busy at the start, one without conditions, a server that takes small requests
    only, a bucket that is set back to an older copy of itself, hosts with full disks for a while, another site that
    fills its part of the bucket with what it finds elsewhere.
    """

    def __init__(self, kind: str, nats: SimNats, objects: SimObjects) -> None:
        self.world, self._nats, self._objects = nats.world, nats, objects
        self._rng, self._kind = nats.world.chance("hardship"), kind

    def begin(self) -> None:
        getattr(self, f"_{self._kind}")()

    def _busy_store(self) -> None:
        self._objects.refusals = [_answer(*each) for each in LATER]
        self._objects.mood = StoreMood(refused=1.0)
        self.world.at(BUSY, lambda: setattr(self._objects, "mood", StoreMood()))

    def _no_conditions(self) -> None:
        self._objects.takes_conditions = False

    def _small_batches(self) -> None:
        self._nats.max_request_batch = SMALL_BATCH

    def _bucket_set_back(self) -> None:
        self.world.at(self._rng.uniform(*LOST), self._copy_bucket)

    def _full_disks(self) -> None:
        for host in ("egress-0", "egress-1", "compaction"):
            at, full = self._rng.uniform(2, 25), self.world.full_disks
            self.world.at(at, partial(full.add, host))
            self.world.at(at + self._rng.uniform(2, 20), partial(full.discard, host))

    def _hostile(self) -> None:
        """Copy objects of the others, whole or in part, to many chains of another site."""
        found = [key for key in self._objects.keys if "/partition=" in key and f"={HOSTILE_SITE}/" not in key]
        for key in self._rng.sample(found, min(4, len(found))):
            body, (head, _, rest) = self._objects.kept[key][0], key.partition("/partition=")
            site, name = re.sub("site=[^/]+", f"site={HOSTILE_SITE}", head), rest.partition("/")[2]
            for number in self._rng.sample(range(500), 8):
                data = self._rng.choice([body, body[: len(body) // 2], self._rng.randbytes(50)])
                self._objects.plant(f"{site}/partition={number}/{name}", data)
        if self.world.now < HOSTILE_FOR:
            self.world.at(self._rng.uniform(0.5, 4), self._hostile)

    def _copy_bucket(self) -> None:
        kept = dict(self._objects.kept)
        self.world.at(self._rng.uniform(2, 12), lambda: self._put_back(kept))

    def _put_back(self, kept: dict[str, tuple[bytes, ObjectInfo]]) -> None:
        self.world.note(f"the bucket is set back: {len(self._objects.kept)} objects, now {len(kept)}")
        self._objects.kept, self._objects.keys = kept, sorted(kept)


def _answer(status: int, code: str) -> Callable[[], FloeError]:
    response = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return lambda: answer_error("put", "simulated", response)
