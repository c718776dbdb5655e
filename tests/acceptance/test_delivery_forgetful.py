"""Into a work queue through faults of everything, short; `make soak` runs it at full length, and others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.delivery_forgetful import work_queue
from tests.support import seeded

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


async def test_the_consumer_of_a_work_queue_sees_each_message_once(s3: Any) -> None:
    found = await work_queue(s3, seeded(), 30, "atomic")
    print(found)
    assert found["messages"] > 1000
