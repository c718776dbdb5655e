"""The publishers that are not the first choice, into three replicas through faults of everything, short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.delivery import delivered
from tests.support import seeded

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


@pytest.mark.parametrize("publisher", ["atomic", "single"])
async def test_six_chains_are_exact_in_spite_of_faults(s3: Any, publisher: str) -> None:
    found = await delivered(s3, seeded(), 30, publisher)
    print(found)
    assert found["messages"] > 500
