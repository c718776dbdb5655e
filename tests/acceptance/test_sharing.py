"""Three instances, four partitions, random kills, pauses and cuts: the run of `make soak`, short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.sharing import shared
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


async def test_three_instances_share_four_partitions_through_kills_pauses_and_cuts(s3: Any) -> None:
    outcome = await shared(s3, seeded(), seconds=12)
    print(outcome.as_json())
    assert outcome.verdict.ok, outcome.verdict.report()
    assert outcome.messages > 0
    assert outcome.faults.total() >= 6
