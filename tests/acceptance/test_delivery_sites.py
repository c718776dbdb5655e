"""A hostile site, and two instances of which one dies, short; `make soak` runs them longer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.foreign_site import foreign_site
from tests.scenarios.takeover import take_overs
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


async def test_what_a_site_writes_under_another_name_is_refused_and_the_others_go_on(s3: Any) -> None:
    found = await foreign_site(s3, seeded(), 12)
    print(found)
    assert found["hostile segments reported"] >= 14


async def test_another_instance_carries_within_lease_times_after_a_kill_and_a_pause(s3: Any) -> None:
    print(await take_overs(s3, seeded(), rounds=1))
