"""Work-queue and interest streams through chaos, short; `make soak` runs it at full length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.retention import retention
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


async def test_every_message_is_archived_once_and_acknowledged(s3: Any) -> None:
    outcome = await retention(s3, seeded(), seconds=8)
    assert outcome.verdict.ok, outcome.verdict.report()
    assert outcome.messages > 500
