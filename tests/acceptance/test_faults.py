"""Two fault runs of `make soak`, short. A failure prints the seed; FLOE_SEED repeats it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.bucket import shuffled
from tests.scenarios.faults import Outcome, kill_rounds
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


def exact(outcome: Outcome) -> None:
    assert outcome.verdict.ok, outcome.verdict.report()
    assert outcome.messages > 0


async def test_the_target_is_exact_after_rounds_of_random_kills(s3: Any) -> None:
    exact(await kill_rounds(s3, seeded(), rounds=4))


async def test_segments_that_arrive_late_and_shuffled_give_the_same_result(s3: Any) -> None:
    exact(await shuffled(s3, seeded(), seconds=8))
