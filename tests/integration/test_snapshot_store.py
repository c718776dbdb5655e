"""Snapshots in a store: put and read back, listed, and trusted only as far as their name proves."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from common.archive.documents import SnapshotRef
from common.chain import Chain
from common.errors import DataError, FloeError, Refused, Unavailable
from common.objects.port import ObjectStore
from common.objects.s3 import S3Account, S3Objects
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.sampler import Sampler
from egress.sampling.snapshot import Snapshot, encode
from tests.support.basics import SharedS3, raises_code
from tests.support.sampling import CHAIN, START_NS, SampledArchive, facts, fold, sent
from tests.support.stores import FaultyStore, answering, raising

T = TypeVar("T")


@pytest.fixture(params=["local", "s3"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> SampledArchive:
    if request.param == "local":
        return SampledArchive(tmp_path)
    s3: SharedS3 = request.getfixturevalue("s3")
    account = S3Account(s3.access_key, s3.secret_key, endpoint_url=s3.endpoint_url)
    return SampledArchive(tmp_path, S3Objects(s3.new_bucket(), account))


@pytest.fixture
def local(tmp_path: Path) -> SampledArchive:
    return SampledArchive(tmp_path)


def sampler_of(site: SampledArchive, values: int = 100) -> Sampler:
    sampler = Sampler(site.sampling)
    fold(sampler, [sent(n, f"n{n}", n / 10, n) for n in range(1, values + 1)])
    return sampler


def bytes_of(site: SampledArchive, position: int = 101, chain: Chain = CHAIN) -> bytes:
    return b"".join(encode(Snapshot(chain, position, site.sampling.digest, 7, sampler_of(site).freeze(), ())))


# On real stores


def test_a_snapshot_comes_back_as_it_was(site: SampledArchive, tmp_path: Path) -> None:
    sampler = sampler_of(site)
    outbox = (Advisory(AdvisoryEvent.RECOVER, "n1", 5, 9),)
    written = site.save(sampler, 101, outbox=outbox)
    [listed] = site.snapshots().list()
    assert (listed.key, listed.size, listed.position) == (written.key, written.size, 101)
    found = site.snapshots().read(listed)
    assert (found.chain, found.position, found.outbox) == (CHAIN, 101, outbox)
    assert found.sampling_digest == site.sampling.digest
    assert facts(Sampler(site.sampling, found.state)) == facts(sampler)
    info = site.objects.head(written.key)
    assert info.metadata["sampling"] == site.sampling.digest == site.snapshots().stored_digest(listed)
    assert sum(len(k) + len(v) for k, v in info.metadata.items()) < 1024
    # A file as well as bytes, and again: it is one object.
    path = tmp_path / "spooled"
    path.write_bytes(bytes_of(site, 102))
    first, second = site.snapshots().write(102, path), site.snapshots().write(102, path.read_bytes())
    assert first.key == second.key
    assert [site.snapshots().read(ref).position for ref in site.snapshots().list()] == [102, 101]


# Objects that contradict their name


def test_one_that_is_gone_since_it_was_listed_is_named_by_key(local: SampledArchive) -> None:
    ref = local.save(sampler_of(local), 101)
    local.objects.delete(ref.key)
    with raises_code(DataError, "E-SNAPSHOT", match="no longer in the store") as caught:
        local.snapshots().read(ref)
    assert ref.key in str(caught.value)
    assert local.snapshots().stored_digest(ref) == ""


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b"x" + raw[1:]])
def test_other_bytes_than_the_name_promises_are_refused(
    local: SampledArchive, change: Callable[[bytes], bytes]
) -> None:
    ref = local.save(sampler_of(local), 101)
    local.objects.put(ref.key, change(local.objects.get(ref.key) or b""))
    with raises_code(DataError, "E-SNAPSHOT", match="expected"):
        local.snapshots().read(local.snapshots().list()[0])


@pytest.mark.parametrize(
    ("position", "chain"), [(102, CHAIN), (101, Chain("us-west", "NODES")), (101, CHAIN.next_incarnation())]
)
def test_a_good_snapshot_of_something_else_is_refused(local: SampledArchive, position: int, chain: Chain) -> None:
    """A copy that somebody made."""
    local.snapshots().write(101, bytes_of(local, position, chain))
    with pytest.raises(DataError, match="as in the key"):
        local.snapshots().read(local.snapshots().list()[0])


def test_a_huge_object_is_not_fetched(local: SampledArchive) -> None:
    ref = local.save(sampler_of(local), 101)
    faulty = FaultyStore(local.objects)
    huge = SnapshotRef(ref.state, ref.key, (1 << 30) + 1, 0.0)
    with pytest.raises(DataError, match="at most"):
        local.snapshots(objects=faulty).read(huge)
    assert faulty.calls["get"] == 0


def test_damage_on_the_line_is_fetched_again(local: SampledArchive) -> None:
    ref = local.save(sampler_of(local), 101)
    faulty = FaultyStore(local.objects).on("get", answering(b"x" * ref.size), nth=1)
    assert local.snapshots(objects=faulty).read(ref).position == 101


@pytest.mark.parametrize("error", [Refused("403"), Unavailable("a web page")])
@pytest.mark.parametrize("verb", ["list", "get", "put_if_absent", "head"])
async def test_a_failed_answer_of_the_store_never_counts_as_a_missing_object(
    local: SampledArchive, verb: str, error: FloeError
) -> None:
    """No sampler begins without a past because of it; `test_s3_faults.py` has pages, policies and broken answers."""
    ref = local.save(sampler_of(local), 101)
    faulty: ObjectStore = FaultyStore(local.objects).on(verb, raising(error))  # type: ignore[assignment]
    snapshots = local.snapshots(objects=faulty)
    calls = {
        "list": snapshots.list,
        "get": lambda: snapshots.read(ref),
        "put_if_absent": lambda: snapshots.write(5, b"new"),
        "head": lambda: snapshots.stored_digest(ref),
    }
    with pytest.raises(type(error)):
        calls[verb]()
    if verb in ("list", "get"):
        with pytest.raises(type(error)):
            await local.resume(101, objects=faulty)


def test_many_values_are_saved_and_read_in_bounded_memory(local: SampledArchive) -> None:
    sampler, values = Sampler(local.sampling, makes_advisories=False), 20_000
    for first in range(0, values, 10_000):
        numbers = range(first, first + 10_000)
        keys = [f"node-{n:09d}.site.example.net" for n in numbers]
        sampler.learn(keys, [START_NS + n for n in numbers], [1000] * len(keys))
    peaks = []

    def step(work: Callable[[], T]) -> T:
        tracemalloc.start()
        found = work()
        peaks.append(tracemalloc.get_traced_memory()[1] >> 20)
        tracemalloc.stop()
        return found

    ref = step(lambda: local.save(sampler, values + 1))
    snapshot = step(lambda: local.snapshots().read(ref))
    assert (snapshot.state.count(), ref.size < 64 * values) == (values, True)
    assert [peak < most for peak, most in zip(peaks, (3, 8), strict=True)] == [True] * 2, peaks
