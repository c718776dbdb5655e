"""The command: how it starts, how it ends, what it prints."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import floe
from common.cli import (
    Duration,
    SequenceType,
    Size,
    config_option,
    json_option,
    print_json,
    run_async,
    run_command,
    table,
)
from common.errors import AnotherWriter, ConfigError, LeaseLost, Refused, SegmentCorrupt, Stopped, UsageError
from infra.local.process import spawn
from tests.support.basics import PATIENCE

ROOT = Path(__file__).parents[2]
HEAD = "site: us-east\nstore: {url: s3://floe}\n"


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "floe.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, **options)


def end(fn: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with the body `fn`."""
    result = CliRunner().invoke(click.command("test")(run_command(fn)), list(arguments))
    return result.exit_code, result.stdout, result.stderr


def raising(error: BaseException) -> Any:
    def body() -> None:
        raise error

    return body


# The command as a whole


def test_help_names_all_commands_and_loads_none_of_them():
    script = (
        "import sys; sys.argv = ['floe', '--help']\nimport floe\n"
        "try: floe.main()\nexcept SystemExit: pass\n"
        "heavy = ('boto3', 'pyarrow', 'pyspark', 'pydantic', 'nats', 'structlog')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in floe.COMMANDS if f"\n  {name} " not in shown.stdout] == []
    assert shown.stdout.endswith("[]\n")


def test_help_is_there_at_once():
    """Nothing that takes long to import is imported for it."""
    code = "import sys, floe; floe.cli(['--help'], standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    slow = {"pyarrow", "boto3", "botocore", "nats", "pydantic", "msgspec", "yaml", "structlog", "pyspark", "rich"}
    assert slow & {name.partition(".")[0] for name in done.stderr.split()} == set()


@pytest.mark.parametrize("name", floe.COMMANDS)
def test_each_command_exists_and_has_help(name: str):
    result = CliRunner().invoke(floe.cli, [name, "--help"], prog_name="floe")
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.startswith(f"Usage: floe {name}")


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("egress", {"run"}),
        ("ingress", {"run"}),
        ("segments", {"ls", "info", "cat", "verify"}),
        ("checkpoint", {"ls", "set"}),
        ("gap", {"ls", "accept"}),
        ("chain", {"ls", "pause", "resume"}),
        ("parked", {"ls", "cat", "retry"}),
        ("config", {"check"}),
    ],
)
def test_each_group_has_its_commands(group: str, names: set[str]):
    command = floe.cli.get_command(click.Context(floe.cli), group)
    assert isinstance(command, click.Group)
    assert names <= set(command.commands)


@pytest.mark.parametrize("name", ["replay", "drill"])
def test_a_command_without_a_group_is_one(name: str):
    command = floe.cli.get_command(click.Context(floe.cli), name)
    assert command is not None
    assert not isinstance(command, click.Group)


def test_the_version_is_that_of_the_distribution():
    assert run("--version").stdout.startswith("floe 0.1.0 (Python 3.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["comfig"], "No such command 'comfig'. Did you mean config?"),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["--nothing"], "No such option"),
        (["config", "check"], "Usage: floe config check [OPTIONS] FILE"),
        (["config", "check", "a", "b"], "Usage: floe config check [OPTIONS] FILE"),
    ],
)
def test_a_wrong_call_ends_with_2_and_the_usage_of_that_command(arguments: list[str], message: str):
    ended = run(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("words", "site", "feed", "message"),
    [
        ("chain pause --target T", "", "", "site '': expected 1 to 63"),
        ("parked cat --target T --sequence 1", "", "", "site '': expected 1 to 63"),
        ("gap accept --first 1 --last 6", "", "NODES", "site '': expected 1 to 63"),
        ("gap accept --first 1 --last 6", "us", "", "feed '': expected 1 to 255"),
        ("checkpoint set --target T --accept", "us", "", "expected --site and --feed together"),
        ("compact --engine local --dry-run", "", "NODES", "found an empty --site or --feed"),
        ("compact --engine local --dry-run", "us", "", "found an empty --site or --feed"),
    ],
)
def test_an_empty_name_is_refused(words: str, site: str, feed: str, message: str):
    """As `--site "$SITE"` gives where the variable is not set."""
    call = [*words.split(), "--site", site, "--feed", feed, "-c", "none.yaml"]
    result = CliRunner().invoke(floe.cli, call, prog_name="floe")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("target", ["", "a.b", "a b"])
def test_a_target_that_no_stream_can_be_called_is_refused(target: str):
    call = ["replay", "--site", "us", "--feed", "NODES", "--target", target, "--dry-run", "-c", "none.yaml"]
    result = CliRunner().invoke(floe.cli, call, prog_name="floe")
    assert (result.exit_code, "--target: expected a stream name" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(closed: str, tmp_path: Path):
    """As some supervisors and shells start a command: what it opens first must not take their place."""
    (tmp_path / "c.yaml").write_text(f"store: {{url: file://{tmp_path}/store}}\nsite: us\n")
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {ROOT / 'floe.py'} segments ls -c {tmp_path}/c.yaml {closed}"],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr


def test_floe_refuses_to_start_with_the_common_of_another_distribution(tmp_path: Path):
    shutil.copy(ROOT / "floe.py", tmp_path / "floe.py")
    ended = subprocess.run(
        [sys.executable, "floe.py", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == (
        f"error[E-COMMON]: the package common: expected {tmp_path / 'common'}, found {ROOT / 'common'}; "
        "install floe-jetstream in an environment of its own, and unset PYTHONPATH\n"
    )


def test_poor_surroundings_do_no_harm(tmp_path: Path):
    file = tmp_path / "f.yaml"
    file.write_text("site: é\n", encoding="utf-8")
    poor = {"PATH": "/usr/bin", "COLUMNS": "0", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run("--help", env=poor, stdin=subprocess.DEVNULL).returncode == 0
    ended = run("config", "check", str(file), env=poor, stdin=subprocess.DEVNULL)
    assert ended.returncode == 78
    assert ended.stderr.startswith("error[E-CONFIG]: ")
    assert "Traceback" not in ended.stderr


# How a command ends


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Stopped("the chain stands", hint="floe gap accept"), 1, "error[E-STOPPED]: the chain stands; floe gap accept"),
        (UsageError("first is after last"), 2, "error[E-USAGE]: first is after last"),
        (SegmentCorrupt("no footer"), 3, "error[E-SEG-CORRUPT]: no footer"),
        (AnotherWriter("row 7 is foreign"), 4, "error[E-WRITER]: row 7 is foreign"),
        (LeaseLost("held by b"), 75, "error[E-LEASE]: held by b"),
        (Refused("no right"), 77, "error[E-REFUSED]: no right"),
        (ConfigError("a", "b"), 78, "error[E-CONFIG]: a\nerror[E-CONFIG]: b"),
        (Stopped("forged\nline"), 1, "error[E-STOPPED]: forged\\nline"),
        (OSError(errno.ENOSPC, "No space left", "/spool/x"), 1, "error[E-DISK]: /spool/x: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error[E-OS]: /x: Permission denied"),
        (KeyError("x"), 1, "error[E-UNEXPECTED]: KeyError: 'x'; this is a bug; --debug or FLOE_DEBUG=1 shows where"),
    ],
)
def test_an_error_is_a_line_on_stderr_and_an_exit_code(error: Exception, code: int, line: str):
    assert end(raising(error)) == (code, "", line + "\n")


def test_errors_of_several_tasks_are_told_each_once_and_the_first_decides():
    group = ExceptionGroup(
        "tasks", [LeaseLost("a"), ExceptionGroup("inner", [LeaseLost("a"), ValueError("b")]), Stopped("c")]
    )
    code, _, told = end(raising(group))
    assert code == 75
    assert [line.split(";")[0] for line in told.splitlines()] == [
        "error[E-LEASE]: a",
        "error[E-UNEXPECTED]: ValueError: b",
        "error[E-STOPPED]: c",
    ]


def test_a_task_that_was_cancelled_beside_an_error_is_not_told():
    group = BaseExceptionGroup("tasks", [asyncio.CancelledError(), Stopped("c")])
    assert end(raising(group)) == (1, "", "error[E-STOPPED]: c\n")


def test_an_interrupt_ends_quietly_with_130():
    assert end(raising(KeyboardInterrupt())) == (130, "", "")
    assert end(raising(BaseExceptionGroup("tasks", [KeyboardInterrupt()]))) == (130, "", "")


def test_what_the_body_returns_is_the_exit_code():
    assert end(lambda: 3)[0] == 3
    assert end(lambda: None)[0] == 0


def test_the_body_may_be_a_coroutine_function():
    async def body() -> int:
        await asyncio.sleep(0)
        click.echo("ran")
        return 4

    assert end(body) == (4, "ran\n", "")


def test_uvloop_runs_what_is_asynchronous_where_it_is_installed():
    uvloop = pytest.importorskip("uvloop")

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert isinstance(run_async(loop()), uvloop.Loop)


def test_a_traceback_is_shown_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    command = click.command("broken")(run_command(raising(KeyError("x"))))
    root = click.Group("floe", commands=[command], params=[click.Option(["--debug"], is_flag=True)])
    assert "Traceback" not in CliRunner().invoke(root, ["broken"]).stderr
    assert "Traceback" in CliRunner().invoke(root, ["--debug", "broken"]).stderr
    monkeypatch.setenv("FLOE_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(root, ["broken"]).stderr
    monkeypatch.setenv("FLOE_DEBUG", "0")
    assert "Traceback" not in CliRunner().invoke(root, ["broken"]).stderr


SCRIPT = """
import sys, time
import click, floe
from common.cli import run_command

@floe.cli.command("body")
@run_command
def body():
    {body}

floe.COMMANDS["body"] = floe.Entry("__main__:body", "")
sys.argv = ["floe", "body"]
floe.main()
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT.format(body=body)]


def test_a_reader_that_goes_away_is_no_error():
    process = spawn(
        script("[click.echo('x' * 1000) for _ in range(10_000)]"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        assert (process.wait(PATIENCE), stderr.read()) == (141, b"")


def test_a_connection_that_breaks_is_an_error_and_no_closed_output():
    ended = subprocess.run(
        script("raise BrokenPipeError(32, 'Broken pipe')"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "error[E-OS]: Broken pipe\n")


def test_closed_outputs_do_not_change_the_exit_code():
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *script("from common.errors import Refused; raise Refused('x')")],
        cwd=ROOT,
        check=False,
        timeout=PATIENCE,
    )
    assert ended.returncode == 77


def test_ctrl_c_ends_with_130_and_without_a_word():
    process = spawn(
        script("print('ready', flush=True); time.sleep(60)"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (130, "")


# Options, types, output


def test_the_configuration_comes_from_the_option_or_the_environment():
    @click.command()
    @config_option
    @json_option
    @run_command
    def command(config: str, as_json: bool) -> None:
        click.echo(f"{config} {as_json}")

    runner = CliRunner()
    assert runner.invoke(command, ["-c", "a.yaml", "--json"]).stdout == "a.yaml True\n"
    assert runner.invoke(command, [], env={"FLOE_CONFIG": "b.yaml"}).stdout == "b.yaml False\n"
    missing = runner.invoke(command, [])
    assert missing.exit_code == 2
    assert "Missing option '-c' / '--config'" in missing.stderr


@click.command()
@click.option("--sequence", type=SequenceType())
@click.option("--age", type=Duration(), default="5m")
@click.option("--size", type=Size(), default="1M")
def typed(sequence: int | None, age: float, size: int) -> None:
    click.echo(f"{sequence} {age} {size}")


def test_parameters_have_the_units_of_the_configuration():
    assert CliRunner().invoke(typed, []).stdout == "None 300.0 1048576\n"
    result = CliRunner().invoke(typed, ["--sequence", "9223372036854775807", "--age", "1h30m", "--size", "64K"])
    assert result.stdout == "9223372036854775807 5400.0 65536\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", "0"], "expected a sequence from 1 to 9223372036854775807, found '0'"),
        (["--sequence", "-5"], "expected a sequence from 1"),
        (["--sequence", "9223372036854775808"], "expected a sequence from 1"),
        (["--sequence", "٣"], "expected a sequence from 1"),
        (["--sequence", "9" * 5000], "expected a sequence from 1"),
        (["--age", "5"], "expected a duration such as"),
        (["--size", "5X"], "expected a size such as"),
    ],
)
def test_other_parameters_are_refused_with_2(arguments: list[str], message: str):
    result = CliRunner().invoke(typed, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    raw: bytes


def test_json_takes_the_values_of_the_program(capsys: pytest.CaptureFixture[str]):
    print_json({"rows": [Row("é", b"\xff")], "set": {2, 1}, "path": Path("/x"), "pair": (1, None)})
    assert json.loads(capsys.readouterr().out) == {
        "rows": [{"name": "é", "raw": "\\xff"}],
        "set": [1, 2],
        "path": "/x",
        "pair": [1, None],
    }


def test_a_table_is_aligned_and_harmless(capsys: pytest.CaptureFixture[str]):
    table([["a\x1b[31m", 5, None], {"CHAIN": "long name", "LAG": 1200, "WHY": "x"}], ["CHAIN", "LAG", "WHY"])
    assert capsys.readouterr().out == ("CHAIN       LAG  WHY\na\\x1b[31m     5  -\nlong name  1200  x\n")


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_table_that_a_program_reads_is_plain_and_unfolded(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(name, "1")
    table([["x" * 200, 1]], ["name", "count"])
    assert capsys.readouterr().out.splitlines()[1] == "x" * 200 + "      1"


def test_a_table_without_rows_is_its_header(capsys: pytest.CaptureFixture[str]):
    table([], ["A", "B"])
    assert capsys.readouterr().out == "A  B\n"


# floe config check


def check(tmp_path: Path, text: str, *options: str) -> tuple[int, str, str]:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    result = CliRunner().invoke(floe.cli, ["config", "check", "f.yaml", *options])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_config_check_says_ok_for_each_document(folder: Path):
    assert check(folder, f"{HEAD}egress: {{feeds: [{{stream: A}}]}}\n---\n{HEAD}") == (
        0,
        "f.yaml:1: ok (site us-east, 1 feeds, 0 targets)\nf.yaml:5: ok (site us-east, 0 feeds, 0 targets)\n",
        "",
    )


def test_config_check_tells_all_problems_of_all_documents(folder: Path):
    assert check(folder, f"{HEAD}sites: x\n---\n{HEAD}egress: {{lease_ttl: 1}}\n") == (
        78,
        "",
        "error[E-CONFIG]: f.yaml:3:1: sites: unknown key; did you mean site?\n"
        "error[E-CONFIG]: f.yaml:7:21: egress.lease_ttl: "
        "expected a duration such as 500ms 5s 5m 1h30m 7d 1w, found 1\n",
    )


def test_config_check_tells_what_is_not_built_in_each_document(folder: Path):
    code, shown, told = check(folder, f"{HEAD}nats: {{jetstream_domain: hub}}\n---\n{HEAD}nats: {{context: prod}}\n")
    assert (code, shown) == (78, "")
    assert [line.split(": ")[1] for line in told.splitlines()] == ["f.yaml:3:26", "f.yaml:7:17"]


def test_config_check_warns_and_goes_on(folder: Path):
    code, _, told = check(folder, HEAD + "nats: {tls: {insecure: true}}\n")
    assert code == 0
    assert told.splitlines()[0] == "warning: egress.nats.tls.insecure: the server's certificate is not checked"


def test_config_check_takes_warnings_for_errors_where_it_is_strict(folder: Path):
    code, shown, told = check(folder, HEAD + "nats: {tls: {insecure: true}}\n", "--strict")
    assert (code, shown) == (78, "")
    assert told.splitlines()[0].startswith("error[E-CONFIG-STRICT]: egress.nats.tls.insecure: ")
    assert check(folder, HEAD, "--strict")[0] == 0


def test_config_check_speaks_json(folder: Path):
    code, shown, _ = check(folder, HEAD + "sites: x\n", "--json")
    assert (code, json.loads(shown)) == (
        78,
        {
            "file": "f.yaml",
            "ok": False,
            "documents": [],
            "problems": [
                {
                    "name": "f.yaml",
                    "line": 3,
                    "column": 1,
                    "path": "sites",
                    "message": "unknown key; did you mean site?",
                }
            ],
            "warnings": [],
        },
    )
    code, shown, _ = check(folder, HEAD, "--json")
    assert (code, json.loads(shown)["documents"]) == (0, [{"site": "us-east", "feeds": 0, "targets": 0}])


def test_config_check_of_a_missing_file_is_a_line(folder: Path):
    result = CliRunner().invoke(floe.cli, ["config", "check", "none.yaml"])
    assert (result.exit_code, result.stderr) == (
        78,
        "error[E-CONFIG]: none.yaml: expected a file that can be read, found: no such file or directory\n",
    )


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_row_of_a_table_is_one_line_on_every_terminal(term: str):
    done = in_terminal("from common.cli import table; table([['x' * 200, 1]], ['name', 'count'])", TERM=term)
    assert "x" * 200 in done
    assert "\x1b[1m" not in in_terminal("from common.cli import table; table([[1]], ['name'])", NO_COLOR="1")


def test_ctrl_c_at_a_question_ends_the_command():
    asked = """
import click
from common.cli import confirm, run_command
@click.command()
@run_command
async def ask() -> None:
    confirm("go on?", False)
ask()
"""
    assert "Aborted!" in in_terminal(asked, answer=b"\x03", upon=b"[y/N]")


def in_terminal(code: str, answer: bytes = b"", upon: bytes = b"", **env: str) -> str:
    """What Python code prints on a terminal of 80 columns, where `answer` is typed once `upon` is there, and again each
    second: a Ctrl-C in the moment before a read begins is only seen by the next one.
    """
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "TERM": "xterm", **env}, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    found, until = b"", time.monotonic() + PATIENCE
    try:
        with suppress(OSError):  # the terminal is gone with the process
            while time.monotonic() < until:
                if select.select([master], [], [], 1.0)[0]:
                    if not (read := os.read(master, 65536)):
                        break
                    found += read
                elif answer and upon in found:
                    os.write(master, answer)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return found.decode()
