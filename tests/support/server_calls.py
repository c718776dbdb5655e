"""Scripts of calls to a nats-server, simulated or real, and their answers in a form that can be compared."""

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.clock import NS_PER_S
from common.errors import FloeError
from common.nats.client import FloeClient, RawSubscription, connect, frame
from common.nats.headers import build_block
from common.nats.kv import KeyValue
from common.nats.protocol import NO_RESPONDERS_CODE
from common.settings.service import NatsSettings
from infra.local.nats import NatsServer
from tests.sim.nats import SimNats
from tests.sim.strands import Carriers
from tests.sim.world import World
from tests.support.basics import PATIENCE

STREAM = "CALLS"  # the stream of most scripts
SUBJECTS = "calls.>"
SETTLED = 0.05  # seconds for more than the expected messages, or for an effect to show
SETTLED_ALONE = 0.5  # the same for a real server, without known answers
ANSWERED = 5.0  # seconds for its answer then
SHORT = 0.25  # seconds of a pull request without messages
LONG = 30.0  # seconds of a pull request that ends before
PLAYED = 12  # scripts at once, which mostly wait

Steps = list[tuple[str, Any]]  # the name of each step and its answer
Texts = dict[str, str]  # the same as text, by number and name of each step
Script = Callable[["Caller"], Awaitable[None]]
CASES: dict[str, Script] = {}
NEWEST_ONLY: set[str] = set()  # of these scripts, those of features that older servers lack


def case(script: Script) -> Script:
    """List a script of the contract by its name."""
    CASES[script.__name__] = script  # type: ignore[attr-defined]
    return script


def newest_case(script: Script) -> Script:
    """List a script for the newest server alone."""
    NEWEST_ONLY.add(script.__name__)  # type: ignore[attr-defined]
    return case(script)


def ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)


def texts(steps: Steps) -> Texts:
    return {f"{number} {step}": repr(answer) for number, (step, answer) in enumerate(steps, 1)}


# Fields of a server or a moment: no part of an answer. Names are those that were asked for.
OWN = {
    *("created", "ts", "time", "cluster", "first_ts", "last_ts", "last_active"),
    *("type", "domain", "name", "limit", "offset"),
}
SILENCE = "no answer"
INVALID_JSON = 10025  # its description is that of a parser


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message that a consumer delivered. `reply`: the subject for its acknowledgement."""

    shown: tuple[Any, ...]
    reply: bytes


Pull = tuple[asyncio.Task[tuple[list[Delivery], RawSubscription]], list[Any]]  # under way, and the received messages


class Caller:
    """One connection of a script. Each call notes its answer under the name of its step.

    `expected`: the answers. A call repeats until it gets them, if a server may need a moment; without them, it
    waits for `settled` seconds.
    """

    def __init__(self, client: FloeClient, expected: Texts | None = None, settled: float = SETTLED) -> None:
        self.client, self._expected, self._settled = client, expected, settled
        self.steps: Steps = []
        self._asked: dict[str, set[str]] = {}
        self._is_other = False  # an answer stayed other than expected: no more waiting

    def note(self, step: str, answer: Any) -> None:
        self.steps.append((step, answer))

    def _number(self, step: str) -> str:
        return f"{len(self.steps) + 1} {step}"

    async def gathered(self, step: str, ask: Callable[[], Awaitable[Any]] | list[Any], settled: float = 0.0) -> None:
        """Note the result of `ask`, or the items that come into a list, as soon as it is as expected."""
        number, loop = self._number(step), asyncio.get_running_loop()
        until = loop.time() + (0.0 if self._is_other else PATIENCE / 4)
        if self._expected is None:
            await asyncio.sleep(max(settled, self._settled))
        while True:
            answer = ask if isinstance(ask, list) else await ask()
            if self._expected is None or repr(answer) == self._expected.get(number):
                break
            if loop.time() > until:
                self._is_other = True
                break
            await asyncio.sleep(0.02)
        self.note(step, answer)

    # The API

    async def api(self, step: str, name: str, request: Any = None) -> dict[str, Any]:
        """Ask the API, and note the answer if `step` has a name."""
        words = name.split(".")
        if words[:2] in (["STREAM", "CREATE"], ["STREAM", "UPDATE"]) and isinstance(request, dict):
            self._asked.setdefault(words[2], set()).update(request)
        payload = b"" if request is None else request if isinstance(request, bytes) else json.dumps(request).encode()
        answer = await self._request(step, self.client.api_subject(name).encode(), payload)
        if isinstance(answer, str):
            self.note(step, answer)
            return {}
        document = json.loads(answer[0])
        if step:
            self.note(step, self._shown(document))
        return dict(document)

    async def make(self, config: dict[str, Any] | None = None, *, step: str = "", name: str = STREAM) -> None:
        """Create the stream of the script."""
        await self.api(step, f"STREAM.CREATE.{name}", {"name": name, "subjects": [SUBJECTS], **(config or {})})

    async def state(
        self, step: str, request: dict[str, Any] | None = None, name: str = STREAM, settled: float = 0.0
    ) -> None:
        """Note the state of the stream once it is as expected, or `settled` seconds later."""

        async def ask() -> Any:
            answer = await self.api("", f"STREAM.INFO.{name}", request)
            return _plain(answer.get("state") or answer)

        await self.gathered(step, ask, settled)

    async def consumer(self, step: str, name: str, config: dict[str, Any] | None = None, action: str = "") -> None:
        config = {"durable_name": name, "ack_policy": "explicit", **(config or {})}
        request = {"stream_name": STREAM, "config": config, **({"action": action} if action else {})}
        subject = f"CONSUMER.CREATE.{STREAM}.{name}"
        if one := config.get("filter_subject"):
            subject += f".{one}"
        await self.api(step, subject, request)

    async def consumer_state(self, step: str, name: str) -> None:
        async def ask() -> Any:
            return self._shown(await self.api("", f"CONSUMER.INFO.{STREAM}.{name}"))

        await self.gathered(step, ask)

    async def counted(self, name: str, pending: int) -> None:
        """Wait until the consumer counts so many messages: a server counts one after it acknowledged it."""
        for _ in range(100):
            answer = await self.api("", f"CONSUMER.INFO.{STREAM}.{name}")
            if answer.get("num_pending") == pending:
                break
            await asyncio.sleep(0.02)

    async def direct(self, step: str, name: str, request: Any = None) -> None:
        """Note a message that is read past the API's JSON."""
        payload = b"" if request is None else json.dumps(request).encode()
        answer = await self._request(step, self.client.api_subject(f"DIRECT.GET.{name}").encode(), payload)
        self.note(step, answer if isinstance(answer, str) else (*_headers(answer[1]), answer[0]))

    # Messages

    async def publish(self, step: str, subject: str = "calls.a", payload: bytes = b"x", *lines: str) -> None:
        """Publish one message and note the answer if `step` has a name."""
        block = build_block([line.encode() for line in lines]) if lines else None
        answer = await self._request(step, subject.encode(), payload, block)
        if step:
            self.note(step, answer if isinstance(answer, str) else _document(answer[0]))

    async def fill(self, number: int, subject: str = "calls.a", payload: bytes = b"x") -> None:
        for _ in range(number):
            await self.publish("", subject, payload)

    async def fast(self, step: str, numbers: list[int], *lines: str, last: int = 0) -> None:
        """Send messages of one fast batch as they are numbered, and note each answer. `last`: of them commits."""
        inbox, answers = self.client.new_inbox(), []

        def sink(_subject: bytes, _reply: bytes, payload: bytes, headers: bytes | None) -> None:
            answers.append(_document(payload) if not headers else _headers(headers))

        subscription = await self.client.subscribe_raw(f"{inbox}.>", sink)
        for number in numbers:
            operation = 0 if number == 1 else 2 if number == last else 1
            reply = f"{inbox}.{'B' + step.replace(' ', '-')}.10.fail.{number}.{operation}.$FI".encode()
            block = build_block([line.encode() for line in lines]) if lines else None
            self.client.send(frame(b"calls.a", b"x", block, reply))
            await self.client.round_trip(PATIENCE)
        await self.gathered(step, answers)
        await asyncio.sleep(SETTLED)  # more than expected
        await subscription.unsubscribe()

    async def pull(
        self, step: str, consumer: str, request: dict[str, Any] | int = 1, *, wait: float = PATIENCE
    ) -> list[Delivery]:
        """Pull, and note messages and statuses that come until the request is over, or within `wait` seconds."""
        return await self.end_pull(step, self.begin_pull(consumer, request, wait))

    def begin_pull(self, consumer: str, request: dict[str, Any] | int = 1, wait: float = PATIENCE) -> Pull:
        """Pull beside the calls that follow, until `end_pull`."""
        shown: list[Any] = []
        return asyncio.get_running_loop().create_task(self._pull(consumer, request, wait, shown)), shown

    async def end_pull(self, step: str, pull: Pull) -> list[Delivery]:
        found, subscription = await pull[0]
        await self.gathered(step, pull[1])
        await subscription.unsubscribe()
        return found

    async def _pull(
        self, consumer: str, request: dict[str, Any] | int, wait: float, shown: list[Any]
    ) -> tuple[list[Delivery], RawSubscription]:
        inbox, found, over = self.client.new_inbox(), [], asyncio.Event()
        if not isinstance(request, dict):
            request = {"batch": request, "expires": ns(LONG)}
        most = request.get("batch", 1)

        def sink(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
            if reply:
                words = reply.decode().split(".")
                numbers = tuple(map(int, [words[-5], words[-4], words[-3], words[-1]]))
                found.append(Delivery((subject, payload, headers, numbers), reply))
                shown.append(found[-1].shown)
            elif (status := _headers(headers))[0].startswith("NATS/1.0 100"):
                shown.extend([status] if status not in shown[-1:] else [])  # their number is a matter of time
            else:
                shown.append(status)
                over.set()
            if len(found) == most:
                over.set()

        subscription = await self.client.subscribe_raw(inbox, sink)
        subject = self.client.api_subject(f"CONSUMER.MSG.NEXT.{STREAM}.{consumer}").encode()
        self.client.send(frame(subject, json.dumps(request).encode(), None, inbox.encode()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), wait)
        return found, subscription

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def acknowledge(self, delivery: Delivery, word: bytes = b"+ACK", step: str = "") -> None:
        """Acknowledge, and wait until the server has taken it."""
        answer = await self._request(step, delivery.reply, word)
        if step:
            self.note(step, answer if isinstance(answer, str) else answer[0])

    async def _request(
        self, step: str, subject: bytes, payload: bytes, headers: bytes | None = None
    ) -> tuple[bytes, bytes | None] | str:
        """Send a request, with patience unless no answer is expected."""
        timeout = ANSWERED
        if self._expected is not None:
            timeout = SHORT if self._expected.get(self._number(step)) == repr(SILENCE) else PATIENCE
        try:
            return await self.client.request_raw(subject, payload, headers, timeout=timeout)
        except FloeError as error:
            return "nobody answers" if error.code == NO_RESPONDERS_CODE else SILENCE

    def _shown(self, document: dict[str, Any]) -> Any:
        """Return an answer without the fields that no script asked for."""
        shown = _plain(document)
        if "config" in shown and "state" in document:
            asked = self._asked.get(document["config"]["name"], set())
            shown["config"] = {key: value for key, value in shown["config"].items() if key in asked}
        elif "delivered" in document:
            shown["config"] = _consumer_config(document["config"])
        elif "consumers" in document:
            shown["consumers"] = sorted(
                each if isinstance(each, str) else each["name"] for each in document["consumers"] or []
            )
        return shown


def _consumer_config(config: dict[str, Any]) -> dict[str, Any]:
    kept = ("durable_name", "ack_policy", "deliver_policy", "opt_start_seq", "filter_subject", "filter_subjects")
    return {key: config[key] for key in kept if key in config}


def _document(payload: bytes) -> Any:
    try:
        return _plain(json.loads(payload), keep=("type",))
    except ValueError:
        return payload


def _plain(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return a value without times, names of servers, and empty fields."""
    if isinstance(value, list):
        return [_plain(each, keep) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("err_code") == INVALID_JSON:
        value = {**value, "description": ""}
    if "hdrs" in value:
        value = {**value, "hdrs": base64.b64decode(value["hdrs"])}
    kept = {
        key: _plain(each, keep)
        for key, each in value.items()
        if (key not in OWN or key in keep) and not key.startswith("_nats.")
    }
    return {key: each for key, each in sorted(kept.items()) if each not in (None, {}, [], False, "", 0) or key == "seq"}


def _headers(block: bytes | None) -> tuple[str, ...]:
    first, *lines = (block or b"").decode().strip().split("\r\n")
    return first, *sorted(line for line in lines if not line.startswith("Nats-Time-Stamp"))


def cases_of(version: str) -> list[str]:
    """Return the names of the scripts that are played on a server; `version`: empty for the newest."""
    return [name for name in CASES if not version or name not in NEWEST_ONLY]


def real_answers(
    binary: Path | None, names: list[str], expected: Mapping[str, Texts] | None = None
) -> dict[str, Steps]:
    """Return the answers of a nats-server to these scripts, several at a time, each in an account of its own.

    `expected`: those to a script, by its name; without it, each state gets time to settle.
    """
    users = "\n".join(f"{name} {{ jetstream: enabled, users: [{{user: {name}, password: x}}] }}" for name in names)

    async def play(url: str) -> list[Steps]:
        gate = asyncio.Semaphore(PLAYED)

        async def one(name: str) -> Steps:
            async with gate:
                settings = NatsSettings(url=(url,), user=name, password="x", connect_timeout=PATIENCE)
                return await _played(settings, CASES[name], expected and expected[name], SETTLED_ALONE)

        return await asyncio.gather(*map(one, names))

    with NatsServer(binary=binary, extra=f"accounts {{\n{users}\n}}") as server:
        return dict(zip(names, asyncio.run(play(server.url)), strict=True))


@cache
def simulated_answers(name: str) -> Steps:
    """Return the answers of the model to a script, in a world of its own."""
    world = World(1, Carriers())
    settings = NatsSettings(url=(f"nats://127.0.0.1:{SimNats(world).port}",))
    process = world.spawn("caller", lambda: _played(settings, CASES[name]))
    try:
        world.run(process.task.done, limit=120.0)
        return list(process.task.result())
    finally:
        world.close()
        process.loop.close()


async def _played(
    settings: NatsSettings, script: Script, expected: Texts | None = None, settled: float = SETTLED
) -> Steps:
    client = await connect(settings, name="calls", rng=random.Random(1))
    caller = Caller(client, expected, settled)
    try:
        await script(caller)
    finally:
        await client.aclose()
    return caller.steps


async def bucket(caller: Caller, name: str = "calls") -> KeyValue:
    """Open a bucket of the product."""
    return await KeyValue(caller.client, name, ttl=None).ensure()
