"""Egress killed around its acknowledgements: what was archived comes again and makes no second segment."""

from __future__ import annotations

import signal
from typing import Any

from common.jetstream.api import stream_info
from tests.crash.test_egress_crash import Process, processes
from tests.support.basics import soon, unique
from tests.support.egress import Bench


async def is_empty(bench: Bench, stream: str) -> bool:
    info = await stream_info(bench.client, stream)
    return info is not None and info.messages == 0


def whole(stream: str) -> dict[str, Any]:
    """A feed whose segments are full before they are old."""
    return {"stream": stream, "segment": {"max_messages": 100, "max_age": "1m"}}


async def test_killed_before_its_acknowledgements(far: Bench) -> None:
    """F03."""
    stream = await far.make_stream(unique("T"), retention="workqueue")
    with processes() as started:
        started.append(Process(far, stream, failpoints="egress.before_ack=kill@2", feeds=[whole(stream)]))
        await soon(lambda: far.chains.read_chain(far.chain(stream)))

        async def has_durable() -> bool:
            return bool((await far.client.api(f"CONSUMER.NAMES.{stream}")).get("consumers"))

        await soon(has_durable)
        await far.publish(stream, (b"%d" % i for i in range(350)))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        before = far.end(stream)
        await far.publish(stream, (b"%d" % i for i in range(350, 370)))
        started.append(Process(far, stream))
        await far.archived_to(stream, 370)
        await soon(lambda: is_empty(far, stream))
        await started[1].drain()
    assert before == 200
    assert [m.payload for m in far.messages(stream)] == [b"%d" % i for i in range(370)]
    assert far.ledger(stream) == {}
    assert sum(len(ref.coverage) for ref in far.refs(stream)) == 370, "no sequence was put twice"
    far.check(stream)
