"""What this machine really is: the facts that the emulated fleet is varied from.

Read from /proc, /sys, /etc and the package database. What a system does not have is left out (an empty
section), never invented. Command lines and environments are not read: they may hold secrets.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

MAX_PROCESSES = 60
MAX_PACKAGES = 1500
MAX_MOUNTS = 40


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine. Sizes in bytes unless a key says otherwise; `packages` is version by name."""

    os: dict[str, str]
    kernel: dict[str, str]
    cpu: dict[str, object]
    memory: dict[str, int]
    mounts: tuple[dict[str, object], ...]
    interfaces: tuple[dict[str, object], ...]
    processes: tuple[dict[str, object], ...]
    packages: dict[str, str]


def read_facts(root: Path = Path("/")) -> Facts:
    """The facts of the machine whose file system is at `root`."""
    return Facts(
        os=_os_release(root),
        kernel={"name": platform.system(), "release": platform.release(), "machine": platform.machine()},
        cpu=_cpu(root),
        memory=_memory(root),
        mounts=tuple(_mounts(root)),
        interfaces=tuple(_interfaces(root)),
        processes=tuple(_processes(root)),
        packages=_packages(root),
    )


def _text(path: Path) -> str:
    """The file's text; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _os_release(root: Path) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in _text(root / "etc/os-release").splitlines() if "=" in line)
    values = {name.lower(): value.strip('"') for name, value in pairs}
    wanted = ("id", "name", "version", "version_id", "pretty_name")
    return {name: values[name] for name in wanted if name in values}


def _cpu(root: Path) -> dict[str, object]:
    info: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    models = [info[name] for name in ("model name", "Processor", "vendor_id") if info.get(name)]
    return {"count": os.cpu_count() or 1, "model": models[0] if models else platform.machine()}


def _memory(root: Path) -> dict[str, int]:
    memory = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        parts = value.split()
        if parts and parts[0].isdigit():
            memory[name] = int(parts[0]) * (1024 if parts[-1] == "kB" else 1)
    return memory


def _mounts(root: Path) -> Iterator[dict[str, object]]:
    for line in _text(root / "proc/mounts").splitlines()[:MAX_MOUNTS]:
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


def _interfaces(root: Path) -> Iterator[dict[str, object]]:
    folder = root / "sys/class/net"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        yield {
            "name": entry.name,
            "mac": _text(entry / "address").strip(),
            "mtu": int(_text(entry / "mtu").strip() or 0),
            "received": int(_text(entry / "statistics/rx_bytes").strip() or 0),
            "sent": int(_text(entry / "statistics/tx_bytes").strip() or 0),
        }


def _processes(root: Path) -> Iterator[dict[str, object]]:
    folder = root / "proc"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    for pid in sorted(int(name) for name in names if name.isdigit())[:MAX_PROCESSES]:
        status = _text(folder / str(pid) / "status")  # empty if the process ended in between
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if "Name" in fields:
            yield {
                "pid": pid,
                "name": fields["Name"],
                "state": fields.get("State", "").split(" ")[0],
                "threads": int(fields.get("Threads", "1")),
                "resident": int(fields.get("VmRSS", "0").split()[0]) * 1024,
            }


def _packages(root: Path) -> dict[str, str]:
    """The installed packages of Debian and its kin; elsewhere those of this Python."""
    packages, name = {}, ""
    for line in _text(root / "var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif line.startswith("Version: "):
            packages[name] = line[9:]
    if not packages:
        packages = {entry.name: entry.version for entry in distributions()}
    return dict(sorted(packages.items())[:MAX_PACKAGES])
