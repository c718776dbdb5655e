"""Into a target of three replicas through faults of everything, short; `make soak` runs all publishers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.delivery import delivered
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


async def test_six_chains_are_exact_in_spite_of_faults_of_servers_instances_and_lines(s3: Any) -> None:
    found = await delivered(s3, seeded(), 12, "auto")
    print(found)
    assert found["messages"] > 1000
