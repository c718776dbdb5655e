"""Three instances, four partitions, random kills, pauses and cuts: the run of `make soak`, short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.sharing import shared
from tests.scenarios.sharing_sampled import sampled_shared
from tests.support import seeded

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]


async def test_three_instances_share_four_partitions_through_kills_pauses_and_cuts(s3: Any) -> None:
    outcome = await shared(s3, seeded(), seconds=12)
    print(outcome.as_json())
    assert outcome.verdict.ok, outcome.verdict.report()
    assert outcome.messages > 0
    assert outcome.faults.total() >= 6


async def test_they_share_a_sampled_feed_and_its_advisories_as_if_one_had_it_undisturbed(s3: Any) -> None:
    found = await sampled_shared(s3, seeded(), seconds=12)
    print(found)
    assert found["messages"] > found["rows"] > 0
    assert found["advisories"] > 0
    assert sum(found["faults"].values()) >= 6
