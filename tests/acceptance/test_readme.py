"""The commands of README and quick start, pasted in order into an empty home: each of them works."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from infra.local.nats import NatsServer
from infra.local.process import free_ports, spawn
from infra.local.seaweedfs import SeaweedFS
from tests.support.basics import PATIENCE, eventually

pytestmark = [pytest.mark.servers, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(sh|yaml)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CLONE = re.compile(r"^git clone <this repository> (\S+)$", re.MULTILINE)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MADE_ELSEWHERE = ("make demo", "make test")
# An installation takes minutes if packages come from a distant registry.
STEP_SECONDS = 5 * PATIENCE


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """Each fenced block to paste: `sh` or `yaml`, and its text without the indentation of its list."""
    for indent, kind, text in FENCE.findall(page.read_text()):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        if not lines[0].startswith(MADE_ELSEWHERE):
            yield kind, "\n".join(lines) + "\n"


class Reader:
    """One shell in an empty home, into which a page is pasted. `addresses`: the replacements of those of the page."""

    def __init__(self, home: Path, addresses: Mapping[str, str]) -> None:
        self.home, self._addresses, self._number = home, addresses, 0
        home.mkdir()
        self._log = (home.parent / "shell.log").open("wb")
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._shell = spawn(
            ["/bin/bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**kept, "HOME": str(home), "PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            start_new_session=True,
        )

    def close(self) -> None:
        """Kill the shell with everything that the page started."""
        if self._shell.poll() is None:
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()
        self._log.close()

    def paste(self, text: str) -> str:
        """Run one block as pasted, and return its output. Fail at the first command that does not exit with 0."""
        self._number += 1
        script, output, code = (self.home.parent / f"{self._number}.{kind}" for kind in ("sh", "out", "rc"))
        script.write_text(self._local(text))
        # In the reader's own shell, for its variables and jobs.
        run = f"failed=0; trap 'failed=$?' ERR; . {script} > {output} 2>&1; trap - ERR"
        self._shell.stdin.write(f"{run}; echo $failed > {code}.new; mv {code}.new {code}\n".encode())
        self._shell.stdin.flush()
        _wait_for(code, self._shell)
        shown = output.read_text()
        assert code.read_text() == "0\n", f"{script.read_text()}\n{shown}\n{self.logs()}"
        return shown

    def save(self, text: str) -> None:
        """Save a file of the page in the working directory of the shell; its first line names it."""
        name = re.match(r"# (\S+\.yaml)\n", text)
        assert name, f"a file without a name:\n{text}"
        self.paste(f"cat > {name[1]} <<'END_OF_FILE'\n{text}END_OF_FILE\n")

    def logs(self) -> str:
        """The end of the log of each service."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.home.rglob("*gress.log"))

    def _local(self, text: str) -> str:
        copy = shlex.quote(str(self.home.parent / "tree"))
        text = CLONE.sub(rf"cp -r {copy} \1", text)
        for address, local in self._addresses.items():
            text = text.replace(address, local)
        return text


def _wait_for(path: Path, shell: subprocess.Popen[bytes]) -> None:
    for _ in range(int(STEP_SECONDS / 0.1)):
        if path.exists():
            return
        try:
            shell.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"{path.name}: no end within {STEP_SECONDS} s, or the shell ended: {shell.poll()}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this tree as a clone has it: files that git tracks, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def read(page: Path, reader: Reader, looks: Mapping[str, str]) -> None:
    """Paste the whole page. `looks`: by command, the pattern that the last command of a block must show. The page waits
    too briefly for a busy machine: such a command is pasted again until it shows the pattern.
    """
    left = dict(looks)
    try:
        for kind, text in steps(page):
            if kind == "yaml":
                reader.save(text)
                continue
            shown = reader.paste(text)
            last = text.splitlines()[-1].partition("#")[0].strip()
            if pattern := left.pop(last, ""):
                eventually(lambda: re.search(pattern, shown) or re.search(pattern, reader.paste(last)), every=1)  # noqa: B023
    finally:
        reader.close()
    assert left == {}, "the page does not have these commands any more"


def test_the_first_real_deployment_works_by_pasting(tmp_path: Path, tree: Path) -> None:
    egress_port, ingress_port = free_ports(2)
    with NatsServer(tmp_path / "site") as site, NatsServer(tmp_path / "centre") as centre, SeaweedFS() as s3:
        addresses = {
            "nats://nats.us-east.example.net:4222": site.url,
            "nats://nats.example.net:4222": centre.url,
            "https://s3.example.net:9000": s3.endpoint_url,
            "my-access-key": s3.access_key,
            "my-secret-key": s3.secret_key,
            "127.0.0.1:9464": f"127.0.0.1:{egress_port}",
            "127.0.0.1:9465": f"127.0.0.1:{ingress_port}",
        }
        looks = {
            "floe segments ls -c site.yaml": r"us-east/NODES",
            "floe status -c central.yaml": r"us-east/NODES\S* .*\b1000 +1000\b",
            "floe drill -c central.yaml us-east/NODES": r"1,?000 messages",
        }
        read(ROOT / "README.md", Reader(tmp_path / "home", addresses), looks)


def test_the_quick_start_works_by_pasting(tmp_path: Path, tree: Path) -> None:
    site, centre, egress_port, ingress_port = free_ports(4)
    addresses = {
        "-p 4222": f"-p {site}",
        "-p 4223": f"-p {centre}",
        "127.0.0.1:4222": f"127.0.0.1:{site}",
        "127.0.0.1:4223": f"127.0.0.1:{centre}",
        "127.0.0.1:9464": f"127.0.0.1:{egress_port}",
        "127.0.0.1:9465": f"127.0.0.1:{ingress_port}",
    }
    looks = {
        "floe status -c central.yaml": r"us-east/NODES\S* .*\b1000 +1000\b",
        "floe drill -c central.yaml us-east/NODES": r"1,?500 messages",
    }
    read(ROOT / "docs" / "quickstart.md", Reader(tmp_path / "home", addresses), looks)
