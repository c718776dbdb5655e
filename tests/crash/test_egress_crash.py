"""Egress killed and stopped as a process: the archive accounts for every message, exactly once."""

import signal

from common.archive.captures import CaptureStore
from tests.support.basics import soon, unique
from tests.support.egress import Bench, Partitioned, feed_of, publish_over
from tests.support.egress_process import Process, processes


# Simulated worlds kill and pause at each failpoint in every run; here egress is a real process.
async def test_killed_between_captures_and_behind_a_put_nothing_is_lost_or_repeated(bench: Bench) -> None:
    """The configuration was captured, the consumers were not; the tail and the mark are right again at the end."""
    stream = await bench.make_stream(unique("T"))
    captures, chain = CaptureStore(bench.chains.layout, bench.objects), bench.chain(stream)

    def captured() -> list[int]:
        return [len(captures.list_captures(chain, kind)) for kind in ("config", "consumers")]

    await bench.publish(stream, (b"%d" % i for i in range(350)))
    with processes() as started:
        for failpoint in ("before_capture=kill@2", "after_put=kill@1"):
            started.append(Process(bench, stream, failpoints=f"egress.{failpoint}"))
            assert await started[-1].ended() == -signal.SIGKILL, started[-1].log.read_text()
            assert captured() == [1, 0] or failpoint.startswith("after_put")
        await bench.publish(stream, [b"more"] * 20)
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 370)
        await soon(lambda: captures.consumers(chain) is not None)
        await started[-1].drained()
    assert captured() == [1, 1]
    await bench.same(stream, stream)
    assert (bench.chains.read_tail(chain), await bench.mark(stream)) == (370, 370)


async def test_killed_while_it_begins_messages_that_left_then_are_gone_before_read(bench: Bench) -> None:
    """The beginning of the chain was stored before."""
    stream = await bench.filled([b"x"] * 50)
    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.after_stream_document=kill"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
    await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 41})
    async with bench.egress({"stream": stream}, lease_ttl="1s"):
        await bench.archived_to(stream, 50)
    assert bench.ledger(stream) == {"gone_before_read": 40}
    bench.check(stream)


async def test_killed_while_an_incarnation_of_partitions_is_closed_nothing_is_in_both_or_in_none(bench: Bench) -> None:
    stream, subjects = await bench.make_stream(unique("T")), ["0.a", "1.a", "2.a"]
    parts, feed = Partitioned(bench, stream, 3), feed_of(stream, segment={"max_age": "1s"})
    await publish_over(bench, stream, subjects, 90, "first")
    await parts.freeze(90)
    ends, before = parts.ends(), parts.messages()
    await bench.recreate(stream)
    await publish_over(bench, stream, subjects, 120, "second")
    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.after_end_noted=kill@3", feeds=[feed], lease_ttl="2s"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        started.append(Process(bench, stream, feeds=[feed], lease_ttl="2s"))
        await parts.archived_to(120, 1)
    assert parts.previous(1) == ends == parts.ends()
    assert (parts.messages(), len(bench.chains.chains(feed=stream))) == (before, 6)
    await parts.same(stream, 1)
