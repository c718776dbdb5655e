"""Two versions beside each other: the previous one and this one, at the two ends and one after the other."""

import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from common.chain import Chain
from common.nats.api import create_stream, stream_info
from common.nats.client import FloeClient
from infra.oracle import prefix_subject, read_source_trace, read_target_traces
from infra.publish import DELETED_SHARE, publish_awkward
from tests.scenarios.processes import ROOT, Service
from tests.support.basics import soon, unique
from tests.support.commands import run_floe
from tests.support.oracle import compare_target

pytestmark = [pytest.mark.servers, pytest.mark.soak]

#: The last commit of the previous version.
BEFORE = "557be4e42eb45309bab9da0eef6c642b0748e4da"
COUNT = 400


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the previous version."""
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the history does not reach back to {BEFORE[:7]}: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tree:
        tree.extractall(folder, filter="data")
    # Python prefers its working directory to installed packages.
    which = [sys.executable, "-c", "import floe, common; print(floe.__file__, common.__file__)"]
    found = subprocess.run(which, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(folder / "floe.py"), str(folder / "common" / "__init__.py")]
    return folder


class Site:
    """A stream of awkward messages at a site, a target at the centre, and a folder between them."""

    def __init__(self, folder: Path, client: FloeClient, nats_url: str) -> None:
        self._folder, self._client, self._random = folder, client, random.Random(7)
        self.stream, self.target = unique("S"), unique("T")
        self.services: list[Service] = []
        self.config = folder / "floe.yaml"
        source = {"site": "us-east", "feed": self.stream, "subject_prefix": "fleet." + self.target}
        create = {"replicas": 1, "storage": "file", "subjects": [f"fleet.{self.target}.>"]}
        target = {"stream": self.target, "create": create, "sources": [source]}

        def role(**more: object) -> dict[str, object]:
            return {
                "monitor": {"listen": ""}, "state_bucket": unique("STATE"), "lease_bucket": unique("LEASES"), **more,
            }  # fmt: skip

        settings = {
            "site": "us-east",
            "nats": {"url": nats_url},
            "store": {"url": f"file://{folder}/store"},
            "egress": role(feeds=[{"stream": self.stream, "segment": {"max_age": "1s"}}]),
            "ingress": role(poll_interval="1s", targets=[target]),
        }
        self.config.write_text(yaml.safe_dump(settings))

    async def publish(self) -> None:
        """Publish COUNT messages more. Messages that egress may have archived already are not deleted again."""
        if not self.services:
            await create_stream(self._client, {"name": self.stream, "subjects": [f"{self.stream}.>"]})
        share = 0.0 if self.services else DELETED_SHARE
        root = self.stream
        await publish_awkward(
            self._client, self.stream, root, self._random, COUNT, deleted_share=share, max_message_bytes=64 * 1024
        )

    def start(self, role: str, tree: Path) -> Service:
        """Start egress or ingress of the checkout `tree`."""
        command = (role, "run", "-c", str(self.config))
        service = Service(self._folder, f"{role}-{len(self.services)}", *command, tree=tree).start()
        self.services.append(service)
        return service

    async def carried(self) -> None:
        """Check that everything is at the target, once, in order and unchanged."""
        expected = await read_source_trace(self._client, self.stream, prefix_subject("fleet." + self.target))
        chain = Chain("us-east", self.stream)

        async def has_arrived() -> bool:
            assert all(service.runs() for service in self.services[-2:]), "\n".join(s.tail() for s in self.services)
            info = await stream_info(self._client, self.target)
            return info is not None and info.messages >= len(expected.sequences)

        await soon(has_arrived, every=0.5)
        arrived = await read_target_traces(self._client, self.target)
        compared = compare_target({chain: expected}, arrived.traces, arrived.foreign)
        assert compared.is_ok, compared
        assert len(expected.sequences) > COUNT / 2


@pytest.fixture
def site(tmp_path: Path, client: FloeClient, nats_url: str) -> Iterator[Site]:
    site = Site(tmp_path, client, nats_url)
    yield site
    for service in site.services:
        service.kill()
        print(service.tail())


@pytest.mark.parametrize("older", ["egress", "ingress"])
async def test_either_end_may_be_of_the_version_before(site: Site, before: Path, older: str) -> None:
    await site.publish()
    for role in ("egress", "ingress"):
        site.start(role, before if role == older else ROOT)

    await site.carried()

    verified = run_floe("segments", "verify", "-c", str(site.config))
    assert verified.code == 0, verified


async def test_an_upgrade_resumes_at_the_former_position(site: Site, before: Path) -> None:
    await site.publish()
    old = [site.start(role, before) for role in ("ingress", "egress")]
    await site.carried()
    for service in old:  # the centre first
        assert service.drain() == 0, service.tail()
        site.start(service.name.partition("-")[0], ROOT)
    await site.publish()

    await site.carried()
