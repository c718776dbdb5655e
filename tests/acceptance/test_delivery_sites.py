"""A hostile site, short; `make soak` runs it longer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.foreign_site import foreign_site
from tests.support.basics import seeded

pytestmark = pytest.mark.servers


async def test_what_a_site_writes_under_another_name_is_refused_and_the_others_go_on(s3: Any) -> None:
    found = await foreign_site(s3, seeded(), 12)
    print(found)
    assert found["hostile segments reported"] >= 14
