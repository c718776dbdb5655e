"""One message after the other into three replicas, through faults of everything, short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.delivery import delivered
from tests.support import seeded

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


async def test_six_chains_are_exact_in_spite_of_faults(s3: Any) -> None:
    found = await delivered(s3, seeded(), 30, "single")
    print(found)
    assert found["messages"] > 500
