"""The side doors through which the product gets time, chance and threads, redirected into the simulated world.

The product takes a clock, but not everywhere: `SystemClock` reads `time`, pools are made by name, some names are drawn
from `secrets`. A replacement stays for the whole operating-system process until `uninstall`.
"""

import asyncio
import errno
import os
import random
import secrets
import socket
import ssl
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import click

import common.archive.guard
import common.archive.writer
import common.clock
import common.failpoints
import common.nats.credentials
import common.objects.open
import common.service.process
import compaction.merge
import compaction.run
import egress.archive
import egress.decisions_cli
import egress.deps
import ingress.chains.locate
import ingress.recovery.history
import ingress.rows.decoder
from common.settings.root import Settings
from tests.sim.store import SimObjects
from tests.sim.strands import LoopCall, SimExecutor, SimLock
from tests.sim.world import NS, Process, World

POOLS = (common.service.process, compaction.run, compaction.merge, egress.deps, ingress.recovery.history)
LOCKS = (egress.archive, common.archive.writer, ingress.rows.decoder, ingress.chains.locate)


class _Current:
    world: World | None = None
    strike: Callable[[str], None] | None = None
    chance: random.Random = random.Random(0)
    opens: tuple[Settings, SimObjects] | None = None  # by commands


def current() -> World:
    """Return the world of the current run."""
    assert _Current.world is not None, "no world"
    return _Current.world


class _Time(types.ModuleType):
    """`time`, as the product's clock reads it."""

    def time(self) -> float:
        process = _any_process()
        return current().epoch + current().now + (process.skew if process else 0.0)

    def time_ns(self) -> int:
        return round(self.time() * NS)

    def monotonic(self) -> float:
        return current().now

    def sleep(self, seconds: float) -> None:
        strand = current().strand
        assert strand is not None, "the event loop would be blocked by a pause"
        strand.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


TIME = _Time("time")


class _Points(dict[str, tuple[str, str]]):
    """All failpoints: each lookup is passed on to the current `strike`."""

    def __contains__(self, name: object) -> bool:
        if _Current.strike is not None and _Current.world is not None and _Current.world.current is not None:
            _Current.strike(str(name))
        return False


#: Replaced names: a namespace, a name in it, its former value.
_replaced: list[tuple[dict[str, Any], str, Any]] = []


def replace(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Replace `name` until `uninstall`."""
    _replaced.append((namespace, name, namespace[name]))
    namespace[name] = value


def uninstall() -> None:
    """Restore all replaced names."""
    _Current.opens = None
    while _replaced:
        namespace, name, value = _replaced.pop()
        namespace[name] = value


def install() -> None:
    """Replace all side doors."""
    install_threads()
    replace(vars(asyncio), "run_coroutine_threadsafe", LoopCall)
    replace(vars(common.clock), "time", TIME)
    replace(vars(common.failpoints), "_points", _Points())
    replace(vars(secrets), "token_hex", lambda size=32: _chance().randbytes(size).hex())
    replace(vars(secrets), "randbelow", lambda most: _chance().randrange(most))
    replace(vars(random), "SystemRandom", lambda: random.Random(_chance().random()))
    # Several processes parse the metadata of each segment; the result does not change.
    replace(vars(common.archive.guard), "read_struct", lru_cache(20_000)(common.archive.guard.read_struct))
    replace(vars(common.archive.writer), "spool_errors", _spooling(common.archive.writer.spool_errors))
    real_pid, real_host = os.getpid, socket.gethostname
    replace(vars(os), "getpid", lambda: found.number if (found := _any_process()) else real_pid())
    replace(vars(socket), "gethostname", lambda: found.host if (found := _any_process()) else real_host())


def _spooling(real: Callable[[Path], AbstractContextManager[None]]) -> Callable[[Path], AbstractContextManager[None]]:
    """Wrap the product's writing of a file: the disk of the host may be full."""

    @contextmanager
    def spooling(folder: Path) -> Iterator[None]:
        with real(folder):
            if (process := _any_process()) is not None and process.host in process.world.full_disks:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield

    return spooling


def install_threads() -> None:
    """Replace the side doors of threads alone."""
    # Two simulated processes share nothing, so they may meet here: a value that both compute does no harm.
    replace(vars(common.objects.open), "_probe_lock", nullcontext())
    for module in POOLS:
        replace(vars(module), "ThreadPoolExecutor", SimExecutor)
    for module in LOCKS:
        locks = types.SimpleNamespace(Lock=SimLock, Event=threading.Event, local=threading.local)
        replace(vars(module), "threading", locks)
    _unlock_cached_properties()
    # No connection of a world has TLS, and loading the machine's CA certificates takes half the time of a seed.
    without_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    replace(vars(common.nats.credentials), "tls_context", lambda _settings: without_tls)


_ROLES = ("common", "egress", "ingress", "compaction")
_unlocked = set[str]()  # names of modules whose cached properties have no locks any more


def _unlock_cached_properties() -> None:
    """Remove the locks from cached properties: Python 3.11 holds one for all instances while a value is computed."""
    products = [m for name, m in sys.modules.items() if name.partition(".")[0] in _ROLES and name not in _unlocked]
    _unlocked.update(each.__name__ for each in products)
    for kind in {each for module in products for each in vars(module).values() if isinstance(each, type)}:
        for each in vars(kind).values():
            if isinstance(each, cached_property):
                vars(each)["lock"] = nullcontext()


def _lead_commands_here() -> None:
    """Redirect commands: they read the configuration of the world, open its store, and print into its trace."""
    replace(vars(egress.decisions_cli), "load_settings", lambda *_, **__: _opened()[0])
    replace(vars(egress.deps), "open_objects", lambda *_, **__: _opened()[1])
    replace(vars(click), "echo", lambda text="", **_: current().note(f"printed: {text}"))


def lead_commands(settings: Settings, objects: SimObjects) -> None:
    """Set the configuration and the store of commands until `uninstall`."""
    if _Current.opens is None:
        _lead_commands_here()
    _Current.opens = settings, objects


def _opened() -> tuple[Settings, SimObjects]:
    assert _Current.opens is not None, "no configuration"
    return _Current.opens


def _any_process() -> Process | None:
    return None if _Current.world is None else _Current.world.current


def _chance() -> random.Random:
    return _Current.chance


@contextmanager
def entered(world: World) -> Iterator[None]:
    """Redirect the side doors into `world`."""
    _Current.world, _Current.chance = world, world.chance("secrets")
    SimExecutor.world = SimLock.world = LoopCall.world = world
    try:
        yield
    finally:
        _Current.world = None


@contextmanager
def striking(strike: Callable[[str], None]) -> Iterator[None]:
    """Call `strike` with the name of each failpoint that a process passes."""
    _Current.strike = strike
    try:
        yield
    finally:
        _Current.strike = None
