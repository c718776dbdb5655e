"""A room for a command as a unit or a container gives it: an unprivileged user, everything read-only but the spool.

A mount namespace of the command's own: the root read-only, nobody's home visible, private /tmp, /run and /var/cache,
Floe in /opt/floe/bin and the files of /etc/floe. The servers of the test are on the same loopback.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.local.process import spawn

ROOT = Path(__file__).parents[2]
NOBODY = 65534
HIDDEN = ("/etc", "/opt", "/run", "/var/cache", "/tmp", "/root", "/home")  # the needed parts of them are bound again

# The folder of the test, the spool, the floe command, the user or nothing; then folders to keep, `--`, words.
SCRIPT = r"""
work=$1 spool=$2 floe=$3 user=$4; shift 4
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/work /mnt/etc
mount --rbind "$work" /mnt/work
mount --rbind /etc /mnt/etc
count=0
for kept in "$@"; do
  [ "$kept" = -- ] && break
  count=$((count + 1)); mkdir "/mnt/$count"; mount --rbind "$kept" "/mnt/$count"
done
for hidden in HIDDEN; do
  if [ -d "$hidden" ]; then mount -t tmpfs -o mode=755 tmpfs "$hidden"; fi
done
count=0
while [ "$1" != -- ]; do
  count=$((count + 1)); mkdir -p "$1"; mount --rbind "/mnt/$count" "$1"; shift
done
shift
ln -s /mnt/etc/* /etc/
rm -f /etc/floe; mkdir /etc/floe; cp -a /mnt/work/etc/. /etc/floe/
cp -a /mnt/work/run/. /run/
mkdir -p /opt/floe/bin /opt/floe/home; ln -s "$floe" /opt/floe/bin/floe
mkdir -p "$spool"; chmod 700 "$spool"; chmod 1777 /tmp
if [ -n "$user" ]; then chown "$user" "$spool"; fi
umount /mnt/work
for each in / /etc /opt /run /mnt; do mount -o remount,ro,bind "$each"; done
cd /
set -- --no-new-privs --inh-caps=-all --bounding-set=-all -- "$@"
if [ -n "$user" ]; then set -- --reuid "$user" --regid "$user" --clear-groups "$@"; fi
exec setpriv "$@"
""".replace("HIDDEN", " ".join(HIDDEN))

# MemoryDenyWriteExecute, as systemd asks the kernel for it (PR_SET_MDWE); older kernels have no such thing.
DENY = "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


def why_no_rooms() -> str:
    """Return why no room can be made here; empty if one can."""
    if missing := [tool for tool in ("unshare", "setpriv", "mount") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)}: not here"
    trial = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && mount -o remount,ro,bind /"
    tried = subprocess.run([*_unshare(), "sh", "-c", trial], capture_output=True, text=True)
    return f"unshare --mount: {tried.stderr.strip()}" if tried.returncode else ""


def _unshare() -> list[str]:
    # Users other than root become root only within the room, without any of its rights.
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


class Room:
    """`files`: its files below /etc/floe and /run, by path; `spool`: the one folder that the user may write.

    `user`: the number of the user, in a room that root makes.
    """

    def __init__(self, folder: Path, spool: str, files: Mapping[str, str], user: int = NOBODY) -> None:
        self._folder, self._spool, self._user = folder, spool, user
        for part in ("etc", "run"):
            (folder / part).mkdir(parents=True)
        for path, text in files.items():
            file = folder / path.replace("/etc/floe/", "etc/").replace("/run/", "run/").lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o444 if path.endswith(".yaml") else 0o400)
            if os.geteuid() == 0 and not path.endswith(".yaml"):
                os.chown(file, user, user)
        self.log = folder / "log"

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], *, deny_write_execute: bool = False
    ) -> subprocess.Popen[bytes]:
        """Run exactly these words; the process id is that of the command."""
        needed = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, ROOT)}
        kept = [path for path in sorted(needed) if any(path.startswith(f"{hidden}/") for hidden in HIDDEN)]
        variables = {"PATH": "/opt/floe/bin:/usr/bin:/bin", "HOME": "/opt/floe/home", **environment}
        denying = [sys.executable, "-I", "-S", "-c", DENY] if deny_write_execute else []
        user = str(self._user) if os.geteuid() == 0 else ""
        making = [*_unshare(), "sh", "-euc", SCRIPT, "sh"]
        making += [str(self._folder), self._spool, f"{sys.prefix}/bin/floe", user]
        clean = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
        with self.log.open("ab") as log:
            return spawn([*making, *kept, "--", *clean, *denying, *words], stdout=log, stderr=log)

    def text(self) -> str:
        """Return its output."""
        return self.log.read_text(errors="replace")
