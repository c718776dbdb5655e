"""A replay that is killed goes on with the same command: no repeat, no hole."""

from __future__ import annotations

import pytest

from tests.scenarios.replay import replay_kills
from tests.support.basics import SharedS3, seeded


@pytest.mark.servers
async def test_a_replay_killed_at_random_points_ends_with_the_range_once(s3: SharedS3) -> None:
    seen = await replay_kills(s3, seeded(), rounds=6)
    assert seen["kills"] >= 6
