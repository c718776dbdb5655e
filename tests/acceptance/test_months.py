"""An archive of a day and a half, hour by hour; `make soak` runs a month of it with many more chains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.months import HOUR, Months, months
from tests.support.basics import seeded

pytestmark = pytest.mark.servers

SHORT = Months(
    sites=2,
    interval=1800,
    hours=36,
    ages=(("NODES", 18 * HOUR), ("EVENTS", 6 * HOUR)),
    stands=range(14, 26),
    also=16,
    first=12_000,
    second=16_000,
    grace=2 * HOUR,
    settle=12,
)


async def test_keys_stay_as_few_as_the_policy_says_and_the_target_is_exact(s3: Any) -> None:
    found = await months(s3, seeded(), SHORT)
    assert found["segments"] == 4 * 36 * 2
    assert found["messages"] > 2000
