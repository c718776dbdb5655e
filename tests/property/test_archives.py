"""Random archives against a naive model of compaction and verify; `make soak` runs more of them (`archives`)."""

from tests.scenarios.archives import archives
from tests.support.basics import seeded


async def test_random_archives_keep_their_rows_and_every_complaint_is_named():
    seen = await archives(seeded(), rounds=8)
    assert seen["merged"]
    assert seen["deleted"]
