"""Egress killed and stopped as a process: the archive accounts for every message, exactly once."""

import json
import signal
import urllib.request
from contextlib import suppress

from common.archive.captures import CaptureStore
from common.nats.kv import KeyValue
from egress.feed import lease_key
from infra.local.process import free_port
from tests.support.basics import PATIENCE, soon, unique
from tests.support.egress import Bench, Partitioned, feed_of, publish_over
from tests.support.egress_process import Process, processes


# Simulated worlds kill and pause at each failpoint in every run; here egress is a real process.
async def test_killed_behind_a_put_nothing_is_lost_or_repeated(bench: Bench) -> None:
    """F01, F02: the tail and the mark are right again after the next start."""
    stream = await bench.make_stream(unique("T"))
    await bench.publish(stream, (b"%d" % i for i in range(350)))
    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.after_put=kill@1"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        await bench.publish(stream, [b"more"] * 20)
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 370)
        await started[1].drained()
    await bench.same(stream, stream)
    assert (bench.chains.read_tail(bench.chain(stream)), await bench.mark(stream)) == (370, 370)


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


async def test_killed_between_captures_the_next_start_makes_the_missing_ones(bench: Bench) -> None:
    """The configuration was captured, the consumers were not."""
    stream = await bench.make_stream(unique("T"))
    captures, chain = CaptureStore(bench.chains.layout, bench.objects), bench.chain(stream)
    await bench.publish(stream, (b"%d" % i for i in range(150)))
    with processes() as started:
        started.append(Process(bench, stream, failpoints="egress.before_capture=kill@2"))
        assert await started[0].ended() == -signal.SIGKILL, started[0].log.read_text()
        assert [len(captures.list_captures(chain, kind)) for kind in ("config", "consumers")] == [1, 0]
        started.append(Process(bench, stream))
        await bench.archived_to(stream, 150)
        await soon(lambda: captures.consumers(chain) is not None)
        await started[1].drained()
    assert [len(captures.list_captures(chain, kind)) for kind in ("config", "consumers")] == [1, 1]
    await bench.same(stream, stream)


async def test_sigterm_stores_the_open_segment_releases_the_lease_and_ends_with_0(bench: Bench) -> None:
    """F07."""
    stream = await bench.make_stream(unique("T"))
    feed = {"stream": stream, "segment": {"max_age": "1h"}}
    with processes() as started:
        listen = f"127.0.0.1:{free_port()}"
        started.append(Process(bench, stream, feeds=[feed], lease_ttl="10s", monitor={"listen": listen}))
        leases = await soon(lambda: KeyValue(bench.client, bench.lease_bucket, ttl=10.0).ensure())

        async def is_reading() -> bool:
            return bool((await bench.client.api(f"CONSUMER.NAMES.{stream}")).get("consumers"))

        def has_all() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"http://{listen}/status", timeout=PATIENCE) as answer:
                part = json.load(answer)["parts"].get(f"egress {stream}", {})
                return (part.get("open_segment") or {}).get("last") == 60
            return False

        await soon(is_reading)
        await bench.publish(stream, [b"x"] * 60)
        await soon(has_all)
        await started[0].drained()
        assert await leases.get(lease_key(bench.chain(stream))) is None
    assert bench.end(stream) == 60
    await bench.same(stream, stream)


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
