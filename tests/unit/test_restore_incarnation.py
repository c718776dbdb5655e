"""The archived history of a stream: the incarnation of a point in time, and the rows around a damaged segment."""

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from common.archive.documents import ChainDocument, ChainStore, StreamDocument
from common.archive.segment import Reason
from common.clock import NS_PER_S, format_time
from common.errors import UsageError
from common.sequences import SequenceRange
from common.service.process import ThreadPool
from common.service.progress import Progress
from common.tasks import Stop
from ingress.recovery.history import ArchivedHistory
from ingress.recovery.plan import RestoreRequest
from ingress.recovery.request import RecoveryParts
from tests.support.clock import ManualClock
from tests.support.compaction import CHAIN, Archive, rows

BEGAN_NS = 1_700_000_000 * NS_PER_S

#: The lives of one stream: second of its creation, the first sequence of the chain, what it continues, and the second
#: of each message.
LIVES: list[tuple[int, int, dict[str, Any], dict[int, int]]] = [
    (0, 1, {}, {1: 10, 2: 11, 3: 12}),
    (100, 1, {}, {1: 110, 2: 111}),
    (200, 4, {"continues_from": {0: 4}, "continued": 0}, {4: 220, 5: 221}),  # deleted, and the first one restored
    (200, 5, {"continues_from": {0: 5}}, {5: 320}),  # set back by one message
    (400, 1, {}, {}),
]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    archive = Archive(tmp_path_factory.mktemp("lives"))
    chains = ChainStore(archive.objects, archive.layout)
    for number, (created, first, continues, messages) in enumerate(LIVES):
        chain, at = CHAIN.with_incarnation(number), format_time(BEGAN_NS + created * NS_PER_S)
        previous = {0: max(LIVES[number - 1][3], default=0)} if number else None
        config = {"name": CHAIN.feed, "subjects": ["nodes.>"], "retention": "limits"}
        chains.create_stream(chain, StreamDocument(config, at, previous, **continues))
        chains.create_chain(chain, ChainDocument((), 1, first))
        for sequence, second in messages.items():
            batch = rows([sequence], at_ns=BEGAN_NS + second * NS_PER_S)
            archive.put(sequence, sequence, batch, chain=chain)
    return archive


def history_of(archive: Archive, request: RestoreRequest) -> ArchivedHistory:
    parts = RecoveryParts(archive.store, ChainStore(archive.objects, archive.layout), ManualClock(), Progress(False))
    return ArchivedHistory(request, parts, ThreadPool("restore", 1))


async def planned(lives: Archive, second: int, named: int | None = None) -> tuple[int, int]:
    """Return the incarnation and the rows of the plan for a second."""
    request = RestoreRequest(CHAIN.site, CHAIN.feed, incarnation=named, to_time_ns=BEGAN_NS + second * NS_PER_S)
    plan = await history_of(lives, request).plan()
    return plan.newest.incarnation, plan.rows


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (5, "/0000: expected a point in time after its first archived message, of 2023-11-14T22:13:30"),
        *((12, (0, 2)), (60, (0, 3))),
        (105, "/0001: expected a point in time after its first archived message, of 2023-11-14T22:15:10"),
        *((111, (1, 1)), (150, (1, 2)), (205, (0, 3)), (221, (2, 4))),
        (300, "expected a time before 2023-11-14T22:17:01.* set back in between: name incarnation 0002 or 0003"),
        *((321, (3, 5)), (390, (3, 5)), (405, (4, 0))),
    ],
)
async def test_the_last_incarnation_that_had_begun_comes_back(
    lives: Archive, second: int, found: tuple[int, int] | str
) -> None:
    with pytest.raises(UsageError, match=found) if isinstance(found, str) else nullcontext():
        assert await planned(lives, second) == found


async def test_a_named_incarnation_comes_back_as_it_is(lives: Archive) -> None:
    assert await planned(lives, 390, 1) == (1, 2)
    with pytest.raises(UsageError, match="/0001: expected a point in time after its first archived message"):
        await planned(lives, 60, 1)


async def test_rows_in_an_unread_range_are_sent_though_a_damaged_segment_may_hold_more(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    chains = ChainStore(archive.objects, archive.layout)
    chains.create_stream(CHAIN, StreamDocument({"name": CHAIN.feed}, format_time(BEGAN_NS), None))
    chains.create_chain(CHAIN, ChainDocument((), 1, 1))
    archive.put(1, 6, rows([1, 4, 6]), ledger={Reason.GONE_BEFORE_READ: 3}, unread=SequenceRange(2, 5))
    damaged = archive.path(archive.put(1, 7).key)
    damaged.write_bytes(damaged.read_bytes()[:-60] + bytes(60))
    with closing(history_of(archive, RestoreRequest(CHAIN.site, CHAIN.feed))) as history:
        plan = await history.plan()
        sent = [*history.rows(plan, plan.begin, ("sequence",), Stop())]
    assert [n for batch in sent for n in batch.column("sequence").to_pylist()] == [1, 4, 6]
    assert "no segment covers 2..5, 7..7" in plan.lossy[0]
