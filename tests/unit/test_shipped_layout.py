"""Names of the shipped layout in docs, hints and packages: units, files, users, values of the chart, keys; and the
options of other programs."""

import ast
import json
import re
from collections.abc import Iterator
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import reference
from tests.support.basics import problem_of
from tests.support.config_keys import every_key
from tests.support.reference import command_at
from tests.support.tree import every_node, parsed
from tests.unit.test_docs import DOCS, FENCED, ROLES, ROOT, joined, sources

INFRA = ROOT / "infra"
UNITS = {path.name: path.read_text() for path in (INFRA / "systemd").iterdir() if path.suffix in (".service", ".timer")}
PACKAGE: list[dict[str, Any]] = yaml.safe_load((INFRA / "nfpm.yaml").read_text())["contents"]
CHART = {path.stem: path.read_text() for path in (INFRA / "helm" / "floe" / "templates").iterdir()}
VALUES: dict[str, Any] = yaml.safe_load((INFRA / "helm" / "floe" / "values.yaml").read_text())
DOCKERFILES = "".join(path.read_text() for path in INFRA.rglob("Dockerfile"))
PAGES = [path for path in DOCS if path.parent.name != "decisions"]
GUIDES = [path for path in PAGES if path.parent.name in ("guides", "start") and path.name != "migrate.md"]
SHIPPED = [*(INFRA / "nfpm").glob("*.sh"), *(INFRA / "systemd").glob("*.yaml")]
HINT = re.compile(r"(?:sudo )?(?=(?:apt-get|aws s3api|nats (?:stream|consumer|backup|kv|context)) [a-z])")
HINTS = [path for role in ROLES for path in (ROOT / role).rglob("*.py") if HINT.search(path.read_text())]
PROGRAMS: dict[str, str | None] = yaml.safe_load((Path(__file__).parent / "programs.yaml").read_text())
HEADS = {each.split()[0] for each in PROGRAMS}
CRON = re.compile(r"(?:[\d*/,-]+ +){5}")
# Of the reader's own, or of other programs: not in the packages.
ELSEWHERE = (
    r"/etc/floe/(credentials/[\w.-]+|monitor\.(pem|key)|scrapers-ca\.pem|central\.creds|floe\.yaml)|/usr/bin/\w+3"
)
FOREIGN = {
    *("acme_cmdb", "credential_process", "default_max_consumers", "role_arn", "source_profile", "sync_interval"),
    *("arg_max", "max_by", "tls_config", "notify_nats", "user_jwt"),
}


def commands_in(path: Path) -> Iterator[str]:
    """Yield the simple commands of a page or a script, and those in the strings of a program."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [each for each in every_node(parsed(path)) if isinstance(each, ast.Constant | ast.JoinedStr)]
        parts = [each.values if isinstance(each, ast.JoinedStr) else [each] for each in nodes]
        texts = ["".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in each) for each in parts]
        found = [line[head.end() :] for each in texts for line in each.splitlines() if (head := HINT.match(line))]
    else:
        fences = FENCED.findall(text) if path.suffix == ".md" else [text]
        found = [line for block in fences for line in joined(block)]
        found += re.findall("`([^`]+)`", FENCED.sub("", text).replace("\n", " "))
    for line in found:
        for part in re.split(r"\s+#\s.*|# [^:]*:|\s(?:\||\|\||&&)\s|(?=\bsystemd-escape\b)|\bif ", line):
            yield re.sub(r'[")]+$', "", (part or "").strip())


def option_problems(command: str) -> Iterator[str]:
    words = command.split()
    known = [" ".join(words[:n]) for n in range(4, 0, -1) if " ".join(words[:n]) in PROGRAMS]
    given = re.findall(r"(?<=\s)--?[A-Za-z][\w-]*|(?<=\s)--(?=\s)", command.partition(" -- ")[0])
    allowed = (PROGRAMS[known[0]] or "").split() if known else []
    yield from [f"no command of programs.yaml: {words[0]}"] * (not known and len(words) > 1)
    yield from (f"no option of programs.yaml: {each}" for each in given if each not in allowed)


def unit_problems(command: str) -> Iterator[str]:
    named = re.match("(?:systemctl|journalctl|systemd-escape) .*", command)
    for word in re.findall(r"(?<![/\w])floe-[a-z*][\w@*.-]*", named[0] if named else ""):
        name = word if word.endswith((".service", ".timer")) else f"{word}.service"
        instance = re.sub(r".*?@|\.\w+$", "", name) if "@" in name else ""
        units = matching(UNITS, re.sub(r"@[^.]*\.", "@.", name))
        verb = {"enable": "[Install]", "disable": "[Install]", "reload": "ExecReload="}.get(command.split()[1], "")
        yield from [f"no unit {name}"] * (not units)
        yield from [f"{name} has no {verb}"] * (not all(verb in UNITS[each] for each in units))
        if "egress@" in name:
            yield from [f"no /etc/floe/{instance}.yaml"] * (instance not in ("", "*", "site"))
        elif "check@" in name and instance:
            [part] = [each for each in command_at("check").params if each.name == "part"]
            yield from [f"no part {instance}"] * (instance not in vars(part.type)["choices"])


def container_problems(command: str) -> Iterator[str]:
    for name in re.findall(r"(?:--set|--set-file|,)[ ]?([\w.]+)=", command) if command.startswith("helm") else ():
        yield from [f"no value {name}"] * (name not in values_of_the_chart())
    for pattern, line in (
        (r"docker .* --target (\S+)", r"^FROM \S+ AS {}$"),
        (r"--build-arg (\w+)=", "^ARG {}="),
        (r"uid=(\d+)", "^USER {0}:{0}$"),
    ):
        for each in re.findall(pattern, command):
            yield from [f"{each} is in no Dockerfile"] * (not re.search(line.format(each), DOCKERFILES, re.MULTILINE))
    for each in re.findall(r"deploy/floe-(\S+)", command):
        yield from [f"no deployment of {each}"] * (f'"floe.name" . }}}}-{each}\n' not in CHART.get(each, ""))
    for label, value in re.findall(r"-l (\S+)=(\S+)", command):
        yield from [f"no label {label}"] * (f"{label}: {value}" not in CHART["_helpers"])
    for secret, key in re.findall(r"secret generic (\S+) --from-literal=(\S+)=", command):
        is_read = f"/etc/floe/credentials/{key}\n" in VALUES["site"]["config"]
        yield from [f"another secret than {secret}"] * ((secret, True) != (VALUES["existingSecret"], is_read))


def values_of_the_chart(part: Any = VALUES, path: str = "") -> set[str]:
    below = part.items() if isinstance(part, dict) else ()
    return {path}.union(*(values_of_the_chart(each, f"{path}.{name}".lstrip(".")) for name, each in below))


def file_problems(command: str) -> Iterator[str]:
    users = re.findall(r"^u (\S+)", (INFRA / "systemd" / "floe.sysusers").read_text(), re.MULTILINE)
    named = re.findall(rf"(?:^install .*?-g|usermod -aG|^{CRON.pattern}(?=[a-z])) ?([a-z]+) ", command)
    yield from (f"no user {each}" for each in named if each not in users)
    if CRON.match(command) and not re.search(r" (/opt/floe|\$HOME/floe)/bin/floe ", command):
        yield "cron searches in /usr/bin and /bin alone"
    for each in re.findall(r"(?<=\s)(infra/[\w./*-]+|requirements[\w-]*\.lock)", command):
        yield from [f"no {each}"] * (not [*ROOT.glob(each)])


def problems(command: str) -> list[str]:
    found = [*file_problems(command), *container_problems(command), *unit_problems(command)]
    return [*found, *option_problems(command)] if command.split(" ")[0] in HEADS else found


@pytest.mark.parametrize("path", [*PAGES, *SHIPPED, *HINTS], ids=lambda path: path.name)
def test_commands_of_other_programs_name_what_is_shipped_and_options_that_exist(path: Path) -> None:
    assert {command: found for command in commands_in(path) if (found := problems(command))} == {}


@pytest.mark.parametrize(
    "command",
    [
        *("systemctl enable floe-egres@site", "systemctl reload floe-compact", "systemctl enable floe-check@a.timer"),
        *(
            "helm install floe infra/helm/floe --set egress.on=1",
            "nats stream edit NODES --max-bits=1",
            "nats stream x",
        ),
        *("install -m 0640 -g flow /dev/stdin /etc/floe/x", "7 * * * *  flow  /opt/floe/bin/floe compact", "curl -k x"),
    ],
)
def test_a_name_that_does_not_exist_is_found(command: str) -> None:
    assert len(problems(command)) == 1


@pytest.mark.parametrize("path", [*PAGES, *SHIPPED], ids=lambda path: path.name)
def test_paths_json_and_error_codes_of_a_page_exist(path: Path) -> None:
    text, shipped = path.read_text(), {each["dst"].rstrip("/") for each in PACKAGE}
    shipped |= {str(parent) for each in shipped for parent in Path(each).parents}
    paths = re.findall(r"(?<![\w.}/])(/(?:etc/(?:floe|default)|usr/(?:bin|lib|share))/[\w./-]*\w)", text)
    codes = set(re.findall(r"\bE-(?!JS)[A-Z0-9-]*[A-Z0-9]\b", text))

    assert [each for each in paths if each not in shipped and not re.fullmatch(ELSEWHERE, each)] == []
    assert codes - {each["code"] for each in reference.data("errors")} == set()
    assert '"${CREDENTIALS_DIRECTORY}/' not in text, "outside of a unit it is not set"
    for block in re.findall(r"^ *```json\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        json.loads(block)


def test_the_packages_hold_readable_configurations_and_disable_every_unit() -> None:
    modes = {each["dst"]: each.get("file_info", {}).get("mode") for each in PACKAGE}
    [line] = re.findall("systemctl disable (.*?) \\|\\|", (INFRA / "nfpm" / "preremove.sh").read_text())

    assert {modes[f"/etc/floe/{name}.yaml"] for name in ("site", "central")} == {0o644}
    assert sorted(line.split()) == sorted(name for name, text in UNITS.items() if "[Install]" in text)


@pytest.mark.parametrize("name", sorted(name for name in UNITS if name.endswith(".service")))
def test_the_options_that_a_unit_proposes_are_those_of_its_command(name: str) -> None:
    [command] = re.findall(r"^ExecStart=/opt/floe/bin/(.*) \$FLOE_OPTIONS$", UNITS[name], re.MULTILINE)
    command = re.sub("%[iI]", "compaction" if "check" in name else "us-east", command)
    assert [problem_of(f"{command} {each}") for each in re.findall(r'"FLOE_OPTIONS=(.+)"', UNITS[name])] == [""]


@cache
def words() -> set[str]:
    return {*re.findall(r"\w+", sources() + "".join(each.read_text() for each in INFRA.rglob("*.y*ml")))}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_each_name_of_a_guide_is_of_the_code(path: Path) -> None:
    """Check keys, metrics, events, columns: words with an underscore or a dot."""
    keys = [[part for part in key.path if part != "*"] for key in every_key()]
    known = {".".join(key[a:b]) for key in keys for a in range(len(key)) for b in range(a + 1, len(key) + 1)}
    sections = {part for key in keys for part in key[:-1]} - {"spark"}
    names = re.findall(r"`([a-z][a-z0-9]*(?:[_.][a-z0-9_]+)+)(?=[`:\[{])", FENCED.sub("", path.read_text()))
    dotted = {each for each in names if each.split(".")[0] in sections and "." in each and not each.endswith(".log")}
    endings = ["^floe_|_(total|bucket|count|sum)$", "_file$"]
    unknown = {each for each in names if not {re.sub(end, "", each) for end in endings} & words() and "." not in each}

    assert (dotted - known - values_of_the_chart(), unknown - FOREIGN) == (set(), set())
