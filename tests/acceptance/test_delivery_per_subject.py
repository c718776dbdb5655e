"""Into a target that keeps one message of each subject, through faults of everything, short."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.delivery_forgetful import per_subject
from tests.support import seeded

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]


async def test_what_is_superseded_was_stored_once(s3: Any) -> None:
    found = await per_subject(s3, seeded(), 30, "auto")
    print(found)
    assert found["messages"] > 1000
