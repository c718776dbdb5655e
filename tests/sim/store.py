"""The port of the object store in simulated time: requests and answers under way, refused, lost, late or unanswered.

A write travels by itself: it may take effect after its sender has timed out, or is dead.
"""

import bisect
import builtins
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from common.errors import FloeError, OutcomeUnknown, Unavailable
from common.objects.port import Body, ChecksumMismatch, ConditionalPutRefused, ObjectInfo, check_key, check_prefix
from tests.sim.world import EPOCH, World

T = TypeVar("T")

WAY = (0.001, 0.02)  # seconds of a request and of its answer
SLOW_WAY = (0.5, 4.0)
PATIENCE = 20.0  # seconds until a client's call without an answer times out
LATEST_LISTED = 10.0  # most seconds until a listing shows an object
LATEST = 45.0  # most seconds that a write may be under way


@dataclass(slots=True)
class StoreMood:
    """Chances by which calls fail: `refused` at once, `lost` on the way or on the way back, `late` a write that takes
    effect after its client has timed out. `slow`: every call. `hidden`: a new segment is listed
    only some seconds later. `silent_until`: no call is answered before.
    """

    refused: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    hidden: float = 0.0
    slow: bool = False
    silent_until: float = 0.0


class SimObjects:
    """One bucket with conditional writes, which keeps the digests of its objects."""

    def __init__(self, world: World) -> None:
        self.world, self.mood, self.calls = world, StoreMood(), 0
        self.swallows_next = False  # the next write is lost on its way
        self.closed: tuple[str, ...] = ()  # prefixes of keys that no client may put
        self.takes_conditions, self.refusals = True, list[Callable[[], FloeError]]()  # one of these is raised
        self.kept: dict[str, tuple[bytes, ObjectInfo]] = {}
        self.keys: list[str] = []
        self._rng, self._versions = world.chance("store"), 0
        self._hidden: dict[str, float] = {}  # by key, the time until which no listing shows it

    # The verbs

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        check_prefix(prefix)
        return self._read(lambda: self._listed(prefix, start_after, limit))

    def get(self, key: str, *, first: int = 0, length: int | None = None) -> bytes | None:
        check_key(key)
        end = None if length is None else first + length
        found = self._read(lambda: self.kept.get(key))
        return None if found is None else found[0][first:end]

    def download(self, key: str, path: Path) -> bool:
        check_key(key)
        if (found := self._read(lambda: self.kept.get(key))) is None:
            return False
        path.write_bytes(found[0])
        return True

    def head(self, key: str) -> ObjectInfo | None:
        check_key(key)
        found = self._read(lambda: self.kept.get(key))
        return None if found is None else found[1]

    def put(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> None:
        data = _checked(key, body, sha256)
        if key.startswith(self.closed):
            raise Unavailable("simulated: no put reaches this key")
        self._write(lambda: self._keep(key, data, metadata))

    def put_if_absent(
        self, key: str, body: Body, *, sha256: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> bool:
        self._check_conditions(key)
        data = _checked(key, body, sha256)
        return self._write(lambda: key not in self.kept and self._keep(key, data, metadata))

    def put_if_match(self, key: str, body: Body, etag: str) -> bool:
        self._check_conditions(key)
        data = _checked(key, body, None)
        return self._write(lambda: key in self.kept and self.kept[key][1].etag == etag and self._keep(key, data, None))

    def _check_conditions(self, key: str) -> None:
        if not self.takes_conditions:
            raise ConditionalPutRefused(f"put {key}: the store refuses conditions")

    def delete(self, key: str) -> None:
        check_key(key)
        self._write(lambda: self.remove(key))

    # Contents of the bucket

    def _listed(self, prefix: str, start_after: str, limit: int | None) -> builtins.list[ObjectInfo]:
        found: builtins.list[ObjectInfo] = []
        at = bisect.bisect_left(self.keys, prefix)
        if start_after:
            at = max(at, bisect.bisect_right(self.keys, start_after))
        while at < len(self.keys) and self.keys[at].startswith(prefix) and (limit is None or len(found) < limit):
            if self._hidden.get(self.keys[at], 0.0) > self.world.now:
                at += 1
                continue
            found.append(self.kept[self.keys[at]][1]._replace(sha256=None, metadata={}))
            at += 1
        return found

    def _keep(self, key: str, data: bytes, metadata: Mapping[str, str] | None) -> bool:
        if key not in self.kept:
            bisect.insort(self.keys, key)
            if key.endswith(".parquet") and self._rng.random() < self.mood.hidden:
                self._hidden[key] = self.world.now + self._rng.uniform(0, LATEST_LISTED)
        digest = hashlib.sha256(data).hexdigest()
        self._versions += 1
        info = ObjectInfo(key, len(data), EPOCH + self.world.now, f"{self._versions:x}", digest, dict(metadata or {}))
        self.kept[key] = data, info
        self.world.note(f"store keeps {key} {digest[:8]}")
        return True

    def plant(self, key: str, data: bytes) -> None:
        """Keep an object that no client of this world has put."""
        self._keep(key, data, None)

    def remove(self, key: str) -> bool:
        if key in self.kept:
            del self.kept[key]
            self.keys.remove(key)
            self.world.note(f"store deletes {key}")
        return True

    # Requests on their way

    def _read(self, work: Callable[[], T]) -> T:
        return self._call(work, is_write=False)

    def _write(self, work: Callable[[], T]) -> T:
        return self._call(work, is_write=True)

    def _call(self, work: Callable[[], T], *, is_write: bool) -> T:
        """Do `work` when the request arrives, and return when its answer does."""
        self.calls += 1
        world, rng, mood = self.world, self._rng, self.mood
        if (strand := world.strand) is None:
            return work()
        there, back = (rng.uniform(*(SLOW_WAY if mood.slow else WAY)) for _ in range(2))
        if rng.random() < mood.refused:
            strand.sleep(there)
            if self.refusals:
                raise rng.choice(self.refusals)()
            raise Unavailable("simulated: the store asks to come back later")
        result: builtins.list[T] = []

        def arrive() -> None:
            result.append(work())

        if is_write and self.swallows_next:
            self.swallows_next = False
            self._unanswered(arrive, is_write=True, is_done=False)
        if world.now < mood.silent_until:
            self._unanswered(arrive, is_write=is_write, is_done=rng.random() < 0.5)
        if rng.random() < mood.lost:
            self._unanswered(arrive, is_write=is_write, is_done=rng.random() < 0.6)
        if is_write and rng.random() < mood.late:
            world.at(PATIENCE + rng.uniform(0, LATEST - PATIENCE), arrive)
            self._unanswered(arrive, is_write=is_write, is_done=False)
        world.at(there, arrive)
        strand.sleep(there + back)
        return result[0]

    def _unanswered(self, arrive: Callable[[], None], *, is_write: bool, is_done: bool) -> NoReturn:
        """Get no answer: wait until the client's timeout, then raise as the port specifies."""
        strand, rng = self.world.strand, self._rng
        assert strand is not None, "only a strand waits"
        if is_write and is_done:
            self.world.at(rng.uniform(*WAY), arrive)
        strand.sleep(rng.uniform(0.05, 1.0) if rng.random() < 0.7 else PATIENCE)
        if is_write:
            raise OutcomeUnknown("simulated: the answer of the store was lost")
        raise Unavailable("simulated: the store does not answer")


def _checked(key: str, body: Body, sha256: str | None) -> bytes:
    check_key(key)
    data = body.read_bytes() if isinstance(body, Path) else bytes(body)
    if sha256 and sha256 != hashlib.sha256(data).hexdigest():
        raise ChecksumMismatch("simulated: the bytes have another digest")
    return data
