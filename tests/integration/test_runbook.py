"""Commands as printed: those of docs/guides/replay.md in a world that lost something; those of all guides, helps and
hints in a sound world, in the shipped layout and by the user of the service.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from common import exits
from common.archive.segment import Message
from common.chain import Chain
from common.nats.api import stream_info
from common.nats.client import FloeClient
from infra.local.nats import NatsServer
from infra.local.process import free_ports
from tests.integration.test_deployments import shipped
from tests.scenarios.processes import Service
from tests.support.basics import PATIENCE, SharedS3, commands_of, eventually, soon, unique
from tests.support.commands import ROOT, Done, configuration, floe, run_here
from tests.support.egress import SITE, Bench
from tests.support.ingress import Archive, Centre, check_exact, closed_at, count_in, rows_of, stop_of
from tests.support.reference import commands as commands_of_floe
from tests.support.rooms import NOBODY, Room, why_no_rooms
from tests.unit.test_docs import ELLIPSIS, FENCED, examples_of, joined, whole_commands, words_of
from tests.unit.test_hints import SAMPLES

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("checking_often")]
ASK = ("checkpoint", "set")  # commands that ask on a terminal: here is none


def commands(section: str) -> list[str]:
    """The lines of the code blocks of a section, in order."""
    page = (ROOT / "docs" / "guides" / "replay.md").read_text()
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert text, section
    blocks = re.findall(r"^( *)```sh\n(.*?)^ *```$", text[1], re.M | re.S)
    return [line.strip() for _, block in blocks for line in block.splitlines()]


@dataclass(frozen=True)
class Page:
    """A section, and the replacements of the names in it."""

    section: str
    names: dict[str, str]

    async def run(self, wanted: str) -> Done:
        """Run the one command that ends in `wanted`; only names are replaced."""
        (line,) = [each for each in commands(self.section) if each.endswith(wanted)]
        program, *words = [
            "/".join(self.names.get(part, part) for part in word.split("/")) for word in shlex.split(line)
        ]
        assert program == "floe"
        yes = ["--yes"] if tuple(words[:2]) == ASK and "--dry-run" not in words else []
        done = await floe(*words, *yes)
        assert done.code == 0, (line, done)
        return done


def recent(first: int, last: int) -> list[Message]:
    """Rows of the last minutes."""
    begin = int((time.time() - 600) * 1e9)
    return [replace(m, timestamp_ns=begin + m.sequence * 1_000_000) for m in rows_of(first, last)]


async def test_the_target_of_the_centre_is_lost(client: FloeClient, tmp_path: Path, nats_url: str) -> None:
    archive = Archive(tmp_path / "store")
    archive.put(recent(1, 30))
    centre = Centre(tmp_path, archive, nats_url)
    last = f"{centre.target}_LAST"
    names = {"central.yaml": str(centre.write()), "FLEET": centre.target, "FLEET_LAST": last, "last": last}
    page = Page("The centre's target is lost", names)
    async with centre.running() as health:
        await closed_at(client, centre, 30)
        await page.run("--subject-prefix last --create")  # beside the living target
        assert await count_in(client, last) == 30

        await client.api(f"STREAM.DELETE.{centre.target}")
        archive.put(recent(31, 40))
        assert (await stop_of(centre, health))["code"] == "E-TARGET-GONE"
        await page.run("--forget")
        check_exact(await centre.carried(client, 40), archive, centre.prefix)


async def test_the_stream_at_a_site_is_lost_and_the_centre_gets_nothing_twice(bench: Bench) -> None:
    name = unique("NODES")
    feed: dict[str, Any] = {"stream": name}
    target, archive = unique("FLEET"), Archive(bench.root / "bucket")
    sources = [{"site": [SITE], "feed": [name], "subject_prefix": target}]
    halting = {"stream": target, "sources": sources, "on_new_incarnation": "halt"}
    centre = Centre(bench.root, archive, str(bench.url), **halting)
    files = {"site.yaml": str(configuration(bench, feed)), "central.yaml": str(centre.write())}
    names = {"us-east": SITE, "NODES": name, "FLEET": centre.target}
    page = Page("A stream that cannot come back as it was", files | names)
    await bench.make_stream(name)
    await bench.publish(name, (b"%d" % n for n in range(300)))
    running = bench.start(bench.settings(feed))
    try:
        async with centre.running() as health:
            await centre.carried(bench.client, 300)
            await bench.client.api(f"STREAM.DELETE.{name}")
            done = await page.run("--into-source --create")
            count = int(re.findall(r"done: (\d+) messages", done.out)[0])

            def halted() -> bool:
                stop = centre.status(health).get("chains", {}).get(str(Chain(SITE, name, 1)), {})
                return stop.get("code") == "E-INCARNATION" and bench.end(name, 1) == count

            await soon(halted)
            page.names["N+1"] = str(count + 1)
            await page.run("--sequence N+1")
            await bench.publish(name, (b"new %d" % n for n in range(5)))
            messages = await centre.carried(bench.client, 305)
    finally:
        await running.drain()
    assert (count, [m.message.payload for m in messages[300:]]) == (300, [b"new %d" % n for n in range(5)])
    former, again = ([(m.sequence, m.subject, m.payload) for m in bench.messages(name, k)] for k in (0, 1))
    assert again[:300] == former, "archived again as it was"
    assert (await stream_info(bench.client, centre.target)).messages == 305


# All commands, in the shipped layout

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
STREAMS = ("NODES", "NODE_DATA", "NODE_DATA_ADVISORIES", "ORDERS")
# In one process: a start of each takes a second.
DRIVER = """
import json, os
from tests import conftest  # its caches take a quarter off
from tests.support.commands import run_here
conftest.pytest_collection_finish()
os.chdir("/var/cache/floe")
for name in os.listdir("/etc/floe"):
    os.symlink(f"/etc/floe/{name}", name)
for words in json.load(open("/run/commands.json")):
    done = run_here(*words)
    print(json.dumps([words, done.code, done.out + done.err]), flush=True)
"""
# Run elsewhere: they do not end, start Spark, or need files of another program.
NOT_HERE = r"^\w+ run |^demo|^emulate|--watch|--follow|--master|--metrics|import-stream-replicator"
# The names in the samples of hints, and those of this world.
NAMES = {"A[ ']TARGET": "FLEET", "IT'S|-dash|a_name": "NODES", "A NAME": "NODES_BEFORE", r"/000\d(/\d)?": "/0000"}
AT_THE_SITE = ("egress", "restore", "import")
# May be refused in a sound world without a terminal; every other command ends with 0.
REFUSED = (
    r"^(gap accept|checkpoint set|replay|restore|import|parked cat|segments quarantine|chain resume .*--all|doctor)\b"
    r"|^egress resolve .*--|^drill .*(--all|--until)"
)
# Never an answer of the world: they mean that the layout, or the command, is wrong.
WRONG = r"Usage:|Traceback|error\[E-(CONFIG|OS|DISK|UNEXPECTED|S3|NATS|STORE)[A-Z-]*\]"


def walked() -> list[list[str]]:
    """Return the words of the commands of guides, helps and hints, one command of each form."""
    lines = [line for path in GUIDES for line in whole_commands(path.read_text())]
    lines += [line for command in commands_of_floe() for line in examples_of(command)]
    found = [words_of(line) for line in lines if ELLIPSIS not in line]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exits, "_path", "/etc/floe/central.yaml")
        hinted = [line for texts in SAMPLES.values() for text in texts() for line in commands_of(text)]
    for name, known in NAMES.items():
        hinted = [re.sub(name, known, line.replace("'\"'\"'", "'")) for line in hinted]
    for line in hinted:
        words = words_of(line)
        file = "/etc/floe/site.yaml" if words[0] in AT_THE_SITE else "/etc/floe/central.yaml"
        found.append([file if word == "/etc/floe/central.yaml" else word for word in words])
    forms = {tuple(each for each in words if not re.search("[A-Z0-9]", each)): words for words in reversed(found)}
    return [words for words in reversed(forms.values()) if not re.search(NOT_HERE, " ".join(words))]


def laid_out(folder: Path, secret: str) -> None:
    """Run the commands that install below /etc/floe by hand, with `folder` in its place and the group of the room."""
    group = str(NOBODY if os.geteuid() == 0 else os.getgid())
    page = (ROOT / "docs" / "guides" / "systemd.md").read_text()
    lines = [line for block in FENCED.findall(page) for line in joined(block) if re.match("install .* /etc/floe", line)]
    for line in [*lines, lines[1].replace("site.yaml", "central.yaml")]:
        command = line.replace("/etc/floe", str(folder)).replace("-g floe", f"-g {group}")
        subprocess.run(["bash", "-ec", command], cwd=ROOT, env={**os.environ, "SECRET": secret}, check=True)


def configured(etc: Path, s3: SharedS3, urls: list[str], ports: dict[str, str]) -> None:
    """Write the shipped configurations with the addresses of this world, and the feeds that the guides name."""
    parts = {"https://minio.example.net:9000": s3.endpoint_url, "s3://floe": f"s3://{s3.new_bucket()}", **ports}
    for name, url in zip(("site", "central"), urls, strict=True):
        text = re.sub("floe-(us-east|central)", s3.access_key, shipped(f"systemd/{name}"))
        for shown, used in {**parts, "nats://127.0.0.1:4222": url}.items():
            text = text.replace(shown, used)
        document = yaml.safe_load(text)
        if name == "site":
            document["egress"] |= {"feeds": [{"stream": each} for each in STREAMS], "not_archived": ["*_BEFORE"]}
            document["egress"]["defaults"] = {"segment": {"max_age": "1s"}}
            document["egress"]["feeds"][1] |= {"inspect_field": "sender", "inspect_duration": "1h"}
        else:
            source = {"site": "us-east", "feed": "NODE_DATA_ADVISORIES", "subject_prefix": "central"}
            other = {"stream": "CENTRAL_ADVISORIES", "create": {"subjects": ["central.>"]}, "sources": [source]}
            document["ingress"]["targets"].append(other)
            document["ingress"]["targets"][0]["sources"][0]["feed"] = ["NODES", "ORDERS"]
        (etc / f"{name}.yaml").write_text(yaml.safe_dump(document))
    blocks = FENCED.findall((ROOT / "docs" / "guides" / "relays.md").read_text())
    (etc / "region.yaml").write_text(dedent("".join(each for each in blocks if "# region.yaml" in each)))


def status_of(port: int, path: str) -> int:
    line = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    line.request("GET", path)
    return line.getresponse().status


def test_every_command_of_guides_helps_and_hints_runs_in_the_shipped_layout(
    tmp_path: Path, s3: SharedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_rooms():
        pytest.skip(f"no room for an unprivileged user can be made here: {why}")
    etc, ports = tmp_path / "room" / "etc", dict(zip(("9464", "9465"), map(str, free_ports(2)), strict=True))
    room = Room(tmp_path / "room", "/var/cache/floe", {"/run/commands.json": json.dumps(walked())})
    laid_out(etc, s3.secret_key)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(etc / "credentials"))
    with NatsServer(tmp_path / "site") as site, NatsServer(tmp_path / "centre") as centre:
        configured(etc, s3, [site.url, centre.url], ports)
        for stream in STREAMS:
            words = f"--stream {stream} --subject {stream}.{{sender}} --create --nodes 10 --rate 0 --count 1010"
            assert run_here("emulate", "--server", site.url, *words.split()).code == 0
        files = (("egress", "site"), ("ingress", "central"))
        services = [Service(tmp_path, role, role, "run", "-c", f"{etc}/{name}.yaml").start() for role, name in files]
        try:
            status = ("status", "-c", f"{etc}/central.yaml")
            eventually(lambda: len(re.findall(r" idle +1010 +1010 ", run_here(*status).out)) == 3, every=1)
            pages = "".join(page.read_text() for page in GUIDES)
            for port, path in set(re.findall(r"curl -s 127\.0\.0\.1:(\d+)(/\w+)", pages)):
                # A part that nothing waited for may not be ready yet.
                eventually(lambda: status_of(int(ports[port]), path) == 200)  # noqa: B023
            process = room.start([sys.executable, "-c", DRIVER], {"PYTHONPATH": str(ROOT)})
            assert process.wait(20 * PATIENCE) == 0, room.text()
        finally:
            for each in services:
                each.kill()
    done = [(" ".join(words), code, text) for words, code, text in map(json.loads, room.text().splitlines())]
    failed = [each for each in done if each[1] and not re.search(REFUSED, each[0])]
    assert failed + [each for each in done if re.search(WRONG, each[2])] == []
    assert len(done) > 100
