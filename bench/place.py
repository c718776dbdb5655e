"""Real servers and processes for a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from common.chain import Chain
from common.open import load_settings, open_store
from common.segments.store import SegmentStore
from infra.local.nats import NatsServer
from infra.local.seaweedfs import SeaweedFS
from tests.scenarios.processes import Service
from tests.support import SharedS3

STREAM = "BENCH"
CHAIN = Chain("bench", STREAM)
TARGET = "TARGET"
SEGMENT = 50_000  # messages; the number of a run is a multiple, so that the last segment closes by itself

run = uvloop.run


@dataclass(frozen=True)
class BenchPlace:
    """A server, an S3 server and a folder."""

    folder: Path
    nats: NatsServer
    s3: SharedS3

    def config(self, bucket: str, feed: Mapping[str, Any] | None = None, **more: Any) -> Path:
        """A configuration for both services; the lease and state buckets are new with each bucket.

        `feed`: further keys of the feed.
        """
        names = {"lease_bucket": f"L_{bucket}", "state_bucket": f"S_{bucket}"}
        target = {
            "stream": f"{TARGET}_{bucket}",
            "create": {"replicas": 1, "storage": "file", "subjects": [f"{bucket}.>"]},
            "sources": [{"site": CHAIN.site, "feed": STREAM, "subject_prefix": bucket}],
        }
        document = {
            "site": CHAIN.site,
            "nats": {"url": self.nats.url},
            "store": {
                "url": f"s3://{bucket}",
                "endpoint_url": self.s3.endpoint_url,
                "access_key_id": self.s3.access_key,
                "secret_access_key": self.s3.secret_key,
            },
            "log": {"level": "warning"},
            "egress": {
                **names,
                "monitor": {"listen": ""},
                "feeds": [{"stream": STREAM, "segment": {"max_messages": SEGMENT}, **(feed or {})}],
            },
            "ingress": {**names, "monitor": {"listen": ""}, "poll_interval": "1s", "targets": [target]},
            **more,
        }
        path = self.folder / f"{bucket}.yaml"
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path

    def service(self, name: str, *command: str) -> Service:
        """A Floe process, started."""
        return Service(self.folder, name, *command).start()


@contextmanager
def place() -> Iterator[BenchPlace]:
    """Servers for one benchmark, stopped at the end."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="floe-bench-") as folder, NatsServer() as nats, SeaweedFS() as s3:
        yield BenchPlace(Path(folder), nats, SharedS3(s3))


def archive_end(store: SegmentStore) -> int:
    """The last sequence that the archive covers without a hole from 1; 0 where it begins with one."""
    end = 0
    for ref in sorted(store.list(CHAIN, level=0), key=lambda ref: ref.coverage.first):
        if ref.coverage.first <= end + 1:
            end = max(end, ref.coverage.last)
    return end


def store_of(config: Path) -> SegmentStore:
    return open_store(load_settings(str(config)))


def until(check: Callable[[], bool], service: Service, seconds: float = 120, every: float = 0.02) -> float:
    """Poll until `check` holds; the moment at which it did."""
    deadline = time.perf_counter() + seconds
    while not check():
        assert service.runs(), service.tail()
        assert time.perf_counter() < deadline, f"not within {seconds} s\n{service.tail()}"
        time.sleep(every)
    return time.perf_counter()


def peak_mb(service: Service) -> float:
    """The peak resident size of a running process so far, in MB (10^6 bytes)."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return round(kib * 1024 / 1e6, 1)
