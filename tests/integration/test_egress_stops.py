"""Stops that `test_egress_resolve.py` does not cause, and their hints; two sources under one name."""

import asyncio
import shlex
import signal
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from common.archive.documents import ChainStart, StreamDocument
from common.nats.api import stream_info
from egress.deps import ConfirmSettings
from egress.evidence import IdentityCheck
from infra.local.process import free_port
from tests.integration.test_egress_workers import parent
from tests.support.basics import soon, unique
from tests.support.commands import command_of, configuration, floe, paste
from tests.support.egress import QUICK, SITE, Bench, feed_of
from tests.support.stores import FaultyStore


async def resolved(bench: Bench, stream: str, **feed: Any) -> tuple[int, list[str]]:
    """The exit code of `floe egress resolve`, and its lines."""
    done = await floe("egress", "resolve", "-c", str(configuration(bench, {"stream": stream, **feed})), stream)
    assert done.err == ""
    return done.code, done.out.splitlines()


# E-SOURCE-UNSTABLE


async def test_a_stream_that_answers_differently_each_time_is_asked_until_it_does_not(bench, monkeypatch):
    stream = await bench.begun([b"first"] * 10)
    tuning = replace(QUICK, confirming=ConfirmSettings(times=3, span=0.6, attempts=4))
    recreating, judge = asyncio.Lock(), IdentityCheck.judge_once

    async def judge_another(*args: Any) -> Any:
        if not recreating.locked():
            async with recreating:
                await bench.recreate(stream)
        return await judge(*args)

    monkeypatch.setattr(IdentityCheck, "judge_once", judge_another)
    async with bench.egress({"stream": stream}, tuning=tuning) as running:
        await soon(lambda: "answers about the stream keep changing" in running.status(stream).get("why", ""))
        assert running.state(stream) == "waiting"
        assert running.status(stream)["hint"].startswith("nothing to do: egress repeats the check")
        assert bench.chains.read_stream(bench.chain(stream, 1)) is None
        await recreating.acquire()
        await bench.archive(stream, [b"second"] * 20, 20, incarnation=1)
    await bench.same(stream, stream, 1)


# E-INCARNATION


async def test_an_incarnation_that_another_site_made_is_left_behind_by_the_command(bench: Bench) -> None:
    stream = await bench.begun([b"first"] * 10)
    await bench.recreate(stream, [b"second"] * 20)
    key = bench.chains.layout.stream_document(bench.chain(stream, 1))
    theirs = StreamDocument({}, "2001-01-01T00:00:00Z", {0: 10}, bench.chains.read_stream(bench.chain(stream)).starts)

    def race(real: Any, written: str, *args: Any, **kwargs: Any) -> Any:
        """Let another site be faster."""
        if written == key:
            bench.objects.put(key, theirs.to_json())
        return real(written, *args, **kwargs)

    objects = FaultyStore(bench.objects).on("put_if_absent", race)
    async with bench.egress({"stream": stream}, objects=objects) as running:
        await soon(lambda: "expected the stream created at 2001" in running.status(stream).get("why", ""))
        hint = running.status(stream)["hint"]
        assert "give one of them another `site`" in hint
        await paste(bench, hint, {"stream": stream})
        await bench.archived_to(stream, 20, incarnation=2)
    await bench.same(stream, stream, 2)


# E-HISTORY


@pytest.mark.parametrize("of", ["stream", "chain"])
async def test_a_document_that_is_missing_or_contradicts_is_restored_or_made_again(bench: Bench, of: str) -> None:
    stream = await bench.begun([b"first"] * 10)
    layout, chain, document = bench.chains.layout, bench.chain(stream), bench.chains.read_chain(bench.chain(stream))
    key = layout.stream_document(chain) if of == "stream" else layout.chain_document(chain)
    kept = bench.objects.get(key)
    if of == "stream":
        bench.objects.delete(key)
        why, hint = f"expected {key} beside its chain.json", "restore that object, and the feed continues by itself"
    else:
        bench.objects.put(key, structs.replace(document, relay=True).to_json())
        why, hint = "its chain.json contradicts stream.json", f"move {key} away"
    async with bench.egress({"stream": stream}) as running:
        status = await running.stopped(stream)
        assert (why in status["why"], hint in status["hint"]) == (True, True), status
        if of == "stream":
            code, lines = await resolved(bench, stream)
            assert (code, lines[0].split(": ")[0]) == (3, f"{SITE}/{stream}/0000/0  E-HISTORY")
            assert lines[1].strip() == status["hint"]
            bench.objects.put(key, kept)
        else:
            bench.objects.delete(key)
        await bench.archive(stream, [b"more"] * 5, 15)
    await bench.same(stream, stream)


# E-SOURCE-GONE


@pytest.mark.parametrize("policy", ["continue", "halt"])
async def test_resolve_gives_the_choices_where_the_stream_was_deleted(bench: Bench, policy: str) -> None:
    stream = await bench.begun([b"first"] * 10)
    feed = {"stream": stream, "on_recreated": policy}
    await bench.delete_stream(stream)
    code, lines = await resolved(bench, **feed)
    assert (code, lines[0].split(": ")[0]) == (3, f"{SITE}/{stream}/0000/0  E-SOURCE-GONE")
    advice = next(n for n, line in enumerate(lines) if line.startswith("  restore the stream as it was, "))
    assert "the feed continues; or create it again" in lines[advice]
    assert ("begins by itself" in lines[advice]) is (policy == "continue")
    restore = lines[advice + 1]
    async with bench.egress(feed) as running:
        await soon(lambda: running.state(stream) == "stopped")
        assert running.status(stream)["hint"].splitlines()[1].split()[4:] == restore.split()[4:]
        if policy == "continue":
            done = await floe(*shlex.split(restore)[1:])
            assert (done.code, await bench.last(stream)) == (0, 10), done
            await bench.archive(stream, [b"second"] * 10, 20)
        else:
            await bench.make_stream(stream)
            await bench.publish(stream, [b"second"] * 20)
            await bench.client.api(f"STREAM.PURGE.{stream}", {"seq": 6})
            again = await floe(*command_of(lines[-1]))
            assert "E-RECREATED" in again.out
            await soon(lambda: "on_recreated: continue" in running.status(stream)["hint"])
            await paste(bench, next(line for line in again.out.splitlines() if "--from 6" in line), feed)
            await bench.archived_to(stream, 20, incarnation=1)
    await bench.same(stream, stream, 0 if policy == "continue" else 1)


# The file that commands name


async def test_the_command_names_the_file_that_was_read(bench: Bench) -> None:
    stream, port = await bench.begun([b"first"] * 10), free_port()
    config = configuration(bench, feed_of(stream, 2), monitor={"listen": f"127.0.0.1:{port}"})
    folder = bench.root / "it's here"
    folder.mkdir()
    config = config.rename(folder / "a site.yaml")
    with parent(config, port, "--workers", "2") as running:

        def hints() -> set[str]:
            parts = [part for each in running.parts() for part in each.values()]
            return {part["hint"] for part in parts if part.get("state") == "stopped"}

        hint = await soon(lambda: asyncio.to_thread(hints))
        running.service.send(signal.SIGTERM)
        assert await running.ended() == 0
    command = command_of(hint.pop())
    assert str(config) in command
    assert str(config).replace("'", "'\"'\"'") in running.service.log.read_text().replace('\\"', '"')
    done = await floe(*command, "--yes")
    left = f"warning: >: 10 messages on 1 subject, {stream}.a, belong to no partition any more\n"
    assert (done.code, done.err) == (0, left)


async def test_without_feeds_the_file_is_named(bench: Bench) -> None:
    config = str(configuration(bench))
    line = f"error[E-CONFIG]: {config}: egress.feeds: expected at least one feed, found none\n"
    for command in (["run"], ["run", "--workers", "2"], ["init"]):
        done = await floe("egress", *command, "-c", config)
        assert (done.code, done.err) == (78, line)


# Two running sources under one name: once one of them closes a chain, the other puts nothing into it


@pytest.mark.parametrize("check", [0.3, 3600.0], ids=["by the look", "before a put"])
async def test_a_chain_another_source_closed_gets_no_more(bench: Bench, check: float) -> None:
    """The other has its own leases and state, as on another host; the first stops, and reports the reason."""
    other, feed = Bench(bench.url, bench.root, bench.client), unique("F")
    mine, theirs = await bench.filled([b"mine"] * 10), await bench.filled([b"theirs"] * 4)
    patient = replace(QUICK, intervals=replace(QUICK.intervals, check=check))
    async with bench.egress({"stream": mine, "name": feed}, tuning=patient) as running:
        await bench.archived_to(feed, 10)
        async with other.egress({"stream": theirs, "name": feed}) as beside:
            await bench.archived_to(feed, 4, incarnation=1)
            if check > 1:
                await bench.publish(mine, [b"mine, late"] * 5)
            await soon(lambda: running.state(feed) == "stopped")
            assert "is forked: incarnation 0000 is back" in running.status(feed)["why"]
            await bench.publish(mine, [b"mine, later"] * 5)
            await bench.publish(theirs, [b"theirs"] * 6)
            await bench.archived_to(feed, 10, incarnation=1)
            await soon(lambda: beside.state(feed) == "reading")
    assert (bench.end(feed), [m.payload for m in bench.messages(feed, 1)]) == (10, [b"theirs"] * 10)
    assert bench.chains.read_stream(bench.chain(feed, 2)) is None


@pytest.mark.parametrize("count", [2, 30], ids=["shorter", "longer"])
async def test_a_queue_that_another_source_has_closed_stops_though_no_row_shows_it(bench: Bench, count: int) -> None:
    """Its archived messages were acknowledged: the stream's `created` decides which incarnation is its own."""
    other, feed = Bench(bench.url, bench.root, bench.client), unique("F")
    mine = await bench.filled([b"mine"] * 10, retention="workqueue")
    theirs = await bench.filled([b"theirs"] * 4)
    async with bench.egress({"stream": mine, "name": feed}) as running:
        await bench.archived_to(feed, 10)
        async with other.egress({"stream": theirs, "name": feed}):
            await bench.archived_to(feed, 4, incarnation=1)
            await soon(lambda: running.state(feed) == "stopped")
            await bench.publish(theirs, [b"theirs"] * count)
            await bench.archived_to(feed, 4 + count, incarnation=1)
            await bench.publish(mine, [b"mine, later"] * 5)
            await soon(lambda: "is forked: incarnation 0000" in running.status(feed)["why"])
    assert bench.chains.read_stream(bench.chain(feed, 2)) is None


async def test_with_the_source_of_the_next_incarnation_it_resumes_there(bench: Bench) -> None:
    stream = await bench.filled([b"x"] * 10)
    async with bench.egress({"stream": stream}) as running:
        await bench.archived_to(stream, 10)
        info = await stream_info(bench.client, stream)
        document = StreamDocument(info.config, info.created, {0: 10}, (ChainStart((), 11),), continues=True)
        bench.chains.create_stream(bench.chain(stream, 1), document)
        await bench.archive(stream, [b"y"] * 5, 15, incarnation=1)
        await soon(lambda: running.state(stream) == "reading")
    assert bench.end(stream) == 10
    bench.check(stream, 1, 11)
    assert [m.payload for m in bench.messages(stream, 1)] == [b"y"] * 5
