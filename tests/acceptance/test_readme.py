"""The commands of quick start and first deployment, pasted into an empty home: each shows the output of the page."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.local.nats import NatsServer
from infra.local.process import free_ports, spawn
from infra.local.s3 import SeaweedFS
from tests.support.basics import PATIENCE, eventually

pytestmark = [pytest.mark.servers, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(sh|yaml|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLONE = re.compile(r"^git clone <this repository> (\S+)$", re.MULTILINE)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# An installation takes minutes if packages come from a distant registry.
STEP_SECONDS = 5 * PATIENCE


def masked(line: str) -> str:
    """Return a line with 0 for each number, and one space between words."""
    return re.sub(r"\d+([,.]\d+)*", "0", " ".join(line.split()))


def missing(page: str, output: str) -> list[str]:
    """Return the lines of a page that the output lacks, with numbers masked. `…` in the page is any text."""
    lines = "\n".join(map(masked, output.splitlines()))
    patterns = {line: ".*".join(map(re.escape, masked(line).split("…"))) for line in page.splitlines() if line}
    return [line for line, pattern in patterns.items() if not re.search(f"^{pattern}$", lines, re.MULTILINE)]


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
        eventually(lambda: code.exists() or self._shell.poll() is not None, STEP_SECONDS, 0.1)
        assert code.exists(), f"the shell ended: {self._shell.poll()}\n{self.logs()}"
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


def read(page: Path, reader: Reader, looks: list[tuple[str, str]]) -> None:
    """Paste the whole page, and compare the output of each block with the one that the page shows. `looks`: commands at
    the ends of blocks, in order, with the pattern that each must show. The page waits too briefly for a busy machine:
    such a command is pasted again until it shows the pattern.
    """
    shown, left = [""], [*looks]
    try:
        for kind, text in FENCE.findall(page.read_text()):
            if kind == "yaml":
                reader.save(text)
            elif kind == "text":
                assert missing(text, "".join(shown)) == [], "".join(shown)
            else:
                shown = [reader.paste(text)]
                last = text.splitlines()[-1]
                if left and left[0][0] == last:
                    pattern = left.pop(0)[1]
                    eventually(lambda: re.search(pattern, shown[-1]) or shown.append(reader.paste(last)), every=1)  # noqa: B023
    finally:
        reader.close()
    assert left == [], "the page does not have these commands any more"


def test_the_first_deployment_works_by_pasting(tmp_path: Path, tree: Path) -> None:
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
        looks = [
            ("floe segments ls -c site.yaml", r"us-east/NODES"),
            ("floe status -c central.yaml", r"us-east/NODES\S* .*\b1000 +1000\b"),
            ("floe drill -c central.yaml us-east/NODES", r"1,?000 messages"),
        ]
        read(ROOT / "docs" / "start" / "first-deployment.md", Reader(tmp_path / "home", addresses), looks)


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
    looks = [
        ("floe status -c site.yaml", r"us-east/NODES\S* +reading +1000 +1000 +0\b"),
        ("floe status -c central.yaml", r"us-east/NODES\S* .*\b1000 +1000\b"),
        ("floe restore -c site.yaml us-east/NODES --yes", r"as in the archive: 1,500 read back"),
        ("floe status -c site.yaml", r"us-east/NODES\S* +reading +1500 +1500 +0\b"),
        ("floe drill -c central.yaml us-east/NODES", r"1,?500 messages"),
    ]
    read(ROOT / "docs" / "start" / "quickstart.md", Reader(tmp_path / "home", addresses), looks)
