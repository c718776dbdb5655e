"""A simulated fleet: the documents that each of N nodes publishes in each interval.

A document has the form of a Choria server's registration: `sender`, `timestamp`, agents, classes, facts
and status. Everything in it is varied from the facts of one real machine, and is the same again for the same
seed, node, turn and time. Nodes of one role and variant share their packages and mounts, as
machines of one role do; names, addresses, sizes and counters are each node's own. At intervals a node is
upgraded: its variant, and with it the size of its document, changes.

Facts are read from /proc, /etc and the package database. Facts that a system does not have are left out (an
empty section), never invented. Processes are not read: their command lines and environments may hold secrets.
"""

import json
import os
import platform
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from common.errors import UsageError

MAX_PACKAGES = 1500
MAX_MOUNTS = 40


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts of one machine. Sizes are in bytes unless a key names another unit; `packages`: version by name."""

    os: dict[str, str]
    kernel: dict[str, str]
    cpu: dict[str, object]
    memory: dict[str, int]
    mounts: tuple[dict[str, object], ...]
    packages: dict[str, str]


def read_facts(root: Path = Path("/")) -> MachineFacts:
    """Read the facts of the machine that has its file system at `root`."""
    return MachineFacts(
        os=_os_release(root),
        kernel={"name": platform.system(), "release": platform.release(), "machine": platform.machine()},
        cpu=_cpu(root),
        memory=_memory(root),
        mounts=tuple(_mounts(root)),
        packages=_installed(root),
    )


def _read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _os_release(root: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in _read_text(root / "etc/os-release").splitlines() if "=" in line)
    values = {name.lower(): value.strip('"') for name, value in pairs}
    wanted = ("id", "name", "version", "version_id", "pretty_name")
    return {name: values[name] for name in wanted if name in values}


def _cpu(root: Path) -> dict[str, object]:
    info: dict[str, str] = {}
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    models = [info[name] for name in ("model name", "Processor", "vendor_id") if info.get(name)]
    return {"count": os.cpu_count() or 1, "model": models[0] if models else platform.machine()}


def _memory(root: Path) -> dict[str, int]:
    memory = {}
    for line in _read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdigit():
            memory[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
    return memory


def _mounts(root: Path) -> Iterator[dict[str, object]]:
    for line in _read_text(root / "proc/mounts").splitlines()[:MAX_MOUNTS]:
        device, path, kind, options = line.split()[:4]
        with suppress(OSError):
            state = os.statvfs(root / path.lstrip("/"))
            yield {
                "device": device,
                "path": path,
                "type": kind,
                "options": options.split(","),
                "size": state.f_blocks * state.f_frsize,
                "available": state.f_bavail * state.f_frsize,
            }


def _installed(root: Path) -> dict[str, str]:
    """Return the installed packages of Debian and its derivatives; on other systems those of this Python."""
    packages, name = {}, ""
    for line in _read_text(root / "var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Version: "):
            packages[name] = line[9:]
    if not packages:
        packages = {entry.name: entry.version for entry in distributions()}
    return dict(sorted(packages.items())[:MAX_PACKAGES])


ROLES = ("web", "db", "cache", "queue", "build", "edge", "mail", "dns")
LOCATIONS = ("ams", "lon", "mlt", "nyc", "sfo", "syd")
AGENTS = ("rpcutil", "choria_util", "package", "service", "puppet", "filemgr", "shell", "scout")
VARIANTS_PER_ROLE = 8  # documents of one role, of different sizes
TURNS_BETWEEN_UPGRADES = 48  # four hours at an interval of five minutes
CPUS = (2, 4, 8, 16, 32, 64)
GIB = 2**30

PROTOCOL = "choria:registration:inventorycontent:1"
_HEAD = (
    b'{"protocol":"%b","sender":"%b","timestamp":%d,"identity":{"hostname":"%b","address":"10.%d.%d.%d",'
    b'"mac":"02:%02x:%02x:%02x:%02x:%02x","serial":"%016x","processors":%d,"memory":%d},'
)
_STATUS = (
    b',"status":{"uptime":%d,"load":[%d.%02d,%d.%02d,%d.%02d],"memory_free":%d,"processes":%d,"cpu_seconds":%d,'
    b'"bytes_received":%d,"bytes_sent":%d,"total_messages":%d,"valid_messages":%d,"initializing":false}}'
)
_OVERHEAD_BYTES = 900  # bytes of everything except the facts, about
_PACKAGE_BYTES = 32  # bytes of JSON that a package entry takes, about


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of documents, in bytes: spread over the range, most of them in its lower third."""

    min_bytes: int = 1024
    max_bytes: int = 15 * 1024

    def __post_init__(self) -> None:
        if not 1 <= self.min_bytes <= self.max_bytes:
            found = f"--min-size {self.min_bytes}, --max-size {self.max_bytes}"
            raise UsageError(f"{found}: expected at least 1 byte, the smaller first")

    def pick(self, rng: random.Random) -> int:
        return self.min_bytes + int((self.max_bytes - self.min_bytes) * rng.betavariate(1.1, 4.0))


class Fleet:
    """`nodes` nodes that publish every `interval` seconds (by which their counters grow)."""

    def __init__(
        self, facts: MachineFacts, *, seed: int, nodes: int, interval: float = 300.0, sizes: Sizes | None = None
    ) -> None:
        if nodes < 1:
            raise UsageError(f"nodes {nodes}: expected at least 1")
        self.nodes = nodes
        self._seed, self._interval = seed, interval
        rng = random.Random(f"{seed} profiles")
        sizes = sizes or Sizes()
        self._bodies = [
            [_shared_body(facts, role, sizes.pick(rng), rng) for _ in range(VARIANTS_PER_ROLE)] for role in ROLES
        ]

    def sender(self, node: int) -> str:
        """Return the host name of `node`, 0 to nodes-1."""
        mixed = _hash64(self._seed, node, 0)
        return f"{ROLES[mixed % len(ROLES)]}{node:05d}.{LOCATIONS[(mixed >> 8) % len(LOCATIONS)]}.example.net"

    def document(self, node: int, turn: int, now: float) -> bytes:
        """Return the document of `node` in the interval `turn` (0 is the first), at `now` seconds since 1970."""
        own, turn_hash = _hash64(self._seed, node, 0), _hash64(self._seed, node, turn + 1)
        variant = (own // 64 + (turn + node) // TURNS_BETWEEN_UPGRADES) % VARIANTS_PER_ROLE
        body = self._bodies[own % len(ROLES)][variant]
        return self._head(node, own, int(now)) + body + self._status(own, turn_hash, turn)

    def _head(self, node: int, own: int, now: int) -> bytes:
        sender = self.sender(node).encode()
        memory = (1 << (own >> 20) % 9) * GIB
        mac = (own & 255, own >> 8 & 255, own >> 16 & 255, node >> 8 & 255, node & 255)
        address = (node >> 16 & 255, node >> 8 & 255, node & 255)
        host = sender.split(b".")[0]
        processors = CPUS[(own >> 24) % len(CPUS)]
        return _HEAD % (PROTOCOL.encode(), sender, now, host, *address, *mac, own, processors, memory)

    def _status(self, own: int, turn_hash: int, turn: int) -> bytes:
        uptime = own % (90 * 86400) + int(turn * self._interval)
        load = turn_hash % 400
        return _STATUS % (
            uptime,
            *divmod(load, 100),
            *divmod(load * 4 // 5 + 7, 100),
            *divmod(load * 3 // 5 + 11, 100),
            (turn_hash >> 9) % (8 * GIB),
            60 + (turn_hash >> 5) % 40,
            uptime * (own % 7 + 1) // 8,
            uptime * (own % 65536) + turn_hash % 1_000_000,
            uptime * (own % 32768) + turn_hash % 500_000,
            uptime // 60 + turn_hash % 50,
            uptime // 60,
        )


def _hash64(seed: int, a: int, b: int) -> int:
    """Return 64 bits that look random and depend on all three arguments (the finalizer of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def _shared_body(facts: MachineFacts, role: str, size: int, rng: random.Random) -> bytes:
    """Return the part that nodes of one role and variant share: JSON members without the braces around them."""
    document: dict[str, object] = {
        "agents": sorted(rng.sample(AGENTS, rng.randint(2, len(AGENTS)))),
        "classes": [f"roles::{role}", "profiles::base", f"profiles::{rng.choice(('blue', 'green'))}"],
        "collectives": ["mcollective", f"{role}_collective"],
    }
    document["facts"] = _facts(facts, size - _OVERHEAD_BYTES, rng)
    return json.dumps(document, separators=(",", ":"))[1:-1].encode()


def _facts(facts: MachineFacts, room: int, rng: random.Random) -> dict[str, object]:
    """Return facts of about `room` bytes of JSON: first those that every machine has, then as many lists as fit."""
    chosen: dict[str, object] = {"os": facts.os, "kernel": facts.kernel, "cpu": facts.cpu}
    room -= len(json.dumps(chosen))
    chosen["mounts"] = _sample_entries(facts.mounts, room // 2, rng)
    room -= len(json.dumps(chosen["mounts"]))
    memory = {name: value * rng.randint(50, 150) // 100 for name, value in facts.memory.items()}
    if room > 2 * len(json.dumps(memory)):
        chosen["memory"] = memory
        room -= len(json.dumps(memory))
    chosen["packages"] = _packages(facts, max(room, 0) // _PACKAGE_BYTES, rng)
    return chosen


def _sample_entries(entries: tuple[dict[str, object], ...], room: int, rng: random.Random) -> list[dict[str, object]]:
    taken = []
    for entry in rng.sample(entries, len(entries)):
        room -= len(json.dumps(entry))
        if room < 0:
            break
        taken.append(entry)
    return taken


def _packages(facts: MachineFacts, count: int, rng: random.Random) -> dict[str, str]:
    names = sorted(rng.sample(sorted(facts.packages), min(count, len(facts.packages))))
    return {name: facts.packages[name] + rng.choice(("", "", "", "+upd1")) for name in names}


def describe(facts: MachineFacts) -> str:
    lists = f"{len(facts.mounts)} mounts, {len(facts.packages)} packages"
    return f"{facts.os.get('pretty_name', facts.kernel['name'])}, {facts.cpu['count']} CPUs, {lists}"
