"""Fixtures that run ingress as processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.processes import Service
from tests.support.basics import unique
from tests.support.ingress import Centre

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an ingress of a centre that ends with the test. Unless `ingress` has keys, it has a lease bucket of its own
    and never waits for the lease of a dead process.
    """
    started: list[Service] = []

    def run(centre: Centre, failpoint: str = "", **ingress: Any) -> Service:
        config = centre.write(**(ingress or {"lease_bucket": unique("L"), "memory_limit": "16M"}))
        env = {"FLOE_FAILPOINTS": failpoint} if failpoint else {}
        started.append(Service(tmp_path, unique("ingress"), "ingress", "run", "-c", str(config), env=env))
        return started[-1].start()

    yield run
    for service in started:
        service.kill()
        print(service.tail(15))
