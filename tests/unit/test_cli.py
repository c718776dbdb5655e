"""The command line: start, exit codes, options, output."""

import asyncio
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from click.types import FloatParamType

import common.cli as cli_module
import floe
from common import cli, exits
from common.clock import parse_time
from common.errors import ConfigError, LeaseLost, SegmentCorrupt, Stopped, UsageError
from common.open import load_settings
from common.service.progress import Progress, format_share
from egress.workers import worker_command
from tests.support.basics import PATIENCE
from tests.support.commands import Done, run_here
from tests.support.reference import command_at, commands

ROOT = Path(__file__).parents[2]
HEAD = "site: us-east\nstore: {url: s3://floe}\n"
FEED_OF_SITE = "egress: {feeds: [{stream: NODES}]}\n"


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    settings = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "timeout": PATIENCE, **options}
    return subprocess.run([sys.executable, *arguments], **settings)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("floe.py", *arguments, **options)


def end(fn: Any, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command with the body `fn`."""
    result = CliRunner().invoke(click.command("test")(cli.run_command(fn)), list(arguments))
    return result.exit_code, result.stdout, result.stderr


def raising(error: BaseException) -> Any:
    def body() -> None:
        raise error

    return body


# The command as a whole


def test_help_names_all_commands_and_loads_none_of_them():
    """Check that the help imports no module that takes long to import."""
    code = "import sys, floe; floe.cli(['--help'], standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    shown = python("-c", code)
    slow = "boto3 botocore pyarrow pyspark pydantic nats structlog numpy google_crc32c msgspec yaml rich"
    assert [name for name in floe.COMMANDS if f"\n  {name} " not in shown.stdout] == []
    assert {*slow.split()} & {name.partition(".")[0] for name in shown.stderr.split()} == set()


WRONG_CALLS = [
    ("comfig", "No such command 'comfig'. Did you mean config?"),
    ("xyzzy", "No such command 'xyzzy'."),
    ("--nothing", "No such option"),
    ("gap -c no", "No such option '-c'. Name a command before it: accept, ls."),
    ("config check", "Usage: floe config check [OPTIONS]"),
    ("chain pause --target T / -c no", "site '': expected 1 to 63"),
    ("gap accept --first 1 --last 6 /NODES -c no", "site '': expected 1 to 63"),
    ("checkpoint set --target T --sequence 3 us -c no", "expected SITE/FEED[/INCARNATION[/PARTITION]]"),
    ("status --watch=999ms -c no", "expected from 1s to 1d, found"),
    ("replay us/NODES --target a.b --dry-run -c no", "--target: expected a stream name"),
    ("drill us/NODES --since 0s -c no", "--since: expected a time before now, found 0s"),
    ("drill us/NODES/0000/0 --exact -c no", "expected SITE/FEED[/INCARNATION], found partition 0: all are drilled"),
    ("compare '' --all -c no", "site '': expected 1 to 63"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_CALLS)
def test_a_wrong_call_ends_with_2_and_names_the_expected(words: str, message: str):
    """Include an empty name: `"$SITE/$FEED"` gives it if the variable is not set."""
    ended = run_here(*shlex.split(words))
    assert (ended.code, ended.out, message in ended.err) == (2, "", True), ended.err


def test_a_number_of_any_command_is_finite():
    options = [(words, each) for words in commands() for each in command_at(*words).params]
    for words, name in ((words, each.opts[0]) for words, each in options if isinstance(each.type, FloatParamType)):
        for text in ("nan", "inf"):
            assert f"Error: Invalid value for '{name}': " in run_here(*words, f"{name}={text}").err, words


@click.command()
@cli.chain_argument
@cli.run_command
def of_chain(selector: cli.ChainSelector) -> None:
    click.echo(repr((selector.site, selector.feed, selector.incarnation, selector.partition)))


CHAIN_ARGUMENTS = [
    ("us/NODES", 0, "('us', 'NODES', None, None)"),
    ("us/N\u00d6DES/9999/65535", 0, "('us', 'N\u00d6DES', 9999, 65535)"),
    ("", 2, "Missing argument 'SITE/FEED[/INCARNATION[/PARTITION]]'"),
    ("us", 2, "expected SITE/FEED[/INCARNATION[/PARTITION]]"),
]


@pytest.mark.parametrize(("words", "code", "shown"), CHAIN_ARGUMENTS)
def test_a_chain_is_named_by_one_argument(words: str, code: int, shown: str):
    result = CliRunner().invoke(of_chain, words.split())
    assert (result.exit_code, shown in result.output) == (code, True), result.output


ODD_CHAINS = (
    *["us-east/NODES/", "us-east//1", "us-east/NODES/x", "us-east/NODES/٣", "us-east/NO DES"],
    *["us-east/NODES/0000/0/0", "us-east/NODES/0000/65536", f"us-east/NODES/{'9' * 5000}", "us-east/NODES/1_0"],
)
TAKING_CHAINS = (
    *("compact {}", "check archive {}", "gap accept {} --first 1 --last 2 --yes", "drill {}"),
    *(f"segments {name} {{}}" for name in ("ls", "info", "cat", "verify")),
    *(f"{name} {{}} --target T" for name in ("chain pause", "chain resume", "replay")),
    *("parked cat {} --target T --sequence 1", "parked retry {} --target T --all"),
    *("checkpoint set {} --target T --sequence 1", "checkpoint set --target T --accept --position {}=1"),
    *(f"egress {name} {{}}" for name in ("resolve", "repartition", "flush")),
)


@pytest.mark.parametrize("words", TAKING_CHAINS)
def test_every_command_names_a_chain_in_one_way(words: str, tmp_path: Path):
    """Check that a text that names no chain gives one line with the expected form."""
    (tmp_path / "c.yaml").write_text(f"store: {{url: file://{tmp_path}/store}}\nsite: us-east\n{FEED_OF_SITE}")
    (tmp_path / "store").mkdir()
    is_check = words.startswith("check ")
    for text in ODD_CHAINS:
        ended = run_here(*(word.format(text) for word in words.split()), "-c", f"{tmp_path}/c.yaml")
        shown = ended.out if is_check else ended.err
        assert ended.code == (3 if is_check else 2), (text, ended)
        assert "expected SITE/FEED[/INCARNATION[/PARTITION]]" in shown, (text, shown)


@pytest.mark.parametrize(
    ("file", "closed", "code"), [("c.yaml", ">&-", 0), ("c.yaml", "<&- >&- 2>&-", 0), ("none.yaml", ">&- 2>&-", 78)]
)
def test_closed_streams_do_no_harm_and_do_not_change_the_exit_code(file: str, closed: str, code: int, tmp_path: Path):
    """Start a command without them, as some supervisors do: the first files it opens must not take their numbers."""
    (tmp_path / "c.yaml").write_text(f"store: {{url: file://{tmp_path}/store}}\nsite: us\n")
    command = f"{sys.executable} {ROOT / 'floe.py'} config check -c {tmp_path}/{file} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, "error" in done.stderr) == (code, False), done.stderr


def test_floe_refuses_to_start_with_the_common_of_another_distribution(tmp_path: Path):
    shutil.copy(ROOT / "floe.py", tmp_path / "floe.py")
    ended = run("--help", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == (
        f"error[E-COMMON]: the package common: expected {tmp_path / 'common'}, found {ROOT / 'common'}; "
        "install floe-jetstream in an environment of its own, and unset PYTHONPATH\n"
    )


def test_a_poor_locale_does_no_harm(tmp_path: Path):
    file = tmp_path / "f.yaml"
    file.write_text("site: é\n", encoding="utf-8")
    poor = {"PATH": "/usr/bin", "COLUMNS": "0", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run("config", "check", "-c", str(file), env=poor, stdin=subprocess.DEVNULL)
    assert (ended.returncode, "Traceback" in ended.stderr) == (78, False)
    assert ended.stderr.startswith("error[E-CONFIG]: ")


# How a command ends


ERRORS = [
    (Stopped("the chain stands", hint="floe gap accept"), 1, "error[E-STOPPED]: the chain stands; floe gap accept"),
    (UsageError("first is after last"), 2, "error[E-USAGE]: first is after last"),
    (SegmentCorrupt("no footer"), 3, "error[E-SEG-CORRUPT]: no footer"),
    (ConfigError("a", "b"), 78, "error[E-CONFIG]: a\nerror[E-CONFIG]: b"),
    (Stopped("forged\nline"), 1, "error[E-STOPPED]: forged\\nline"),
    (OSError(errno.ENOSPC, "No space left", "/spool/x"), 1, "error[E-DISK]: /spool/x: No space left"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error[E-OS]: /x: Permission denied"),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "error[E-OS]: Broken pipe"),  # a broken connection
    (KeyError("x"), 1, "error[E-UNEXPECTED]: KeyError: 'x'; this is a defect; --debug or FLOE_DEBUG=1 shows more"),
    (BaseExceptionGroup("tasks", [asyncio.CancelledError(), Stopped("c")]), 1, "error[E-STOPPED]: c"),
    (KeyboardInterrupt(), 130, ""),
    (BaseExceptionGroup("tasks", [KeyboardInterrupt()]), 130, ""),
]


@pytest.mark.parametrize(("error", "code", "line"), ERRORS)
def test_an_error_is_a_line_on_stderr_and_an_exit_code(error: BaseException, code: int, line: str):
    assert end(raising(error)) == (code, "", line and line + "\n")


def test_errors_of_several_tasks_are_each_shown_once_the_first_decides():
    inner = ExceptionGroup("inner", [LeaseLost("a"), ValueError("b")])
    code, _, err = end(raising(ExceptionGroup("tasks", [LeaseLost("a"), inner, Stopped("c")])))
    expected = ["error[E-LEASE]: a", "error[E-UNEXPECTED]: ValueError: b", "error[E-STOPPED]: c"]
    assert (code, [line.split(";")[0] for line in err.splitlines()]) == (75, expected)


def test_what_the_body_returns_is_the_exit_code():
    async def asynchronous() -> int:
        click.echo("ran")
        return 4

    assert (end(lambda: None)[0], end(asynchronous)) == (0, (4, "ran\n", ""))


def test_uvloop_runs_what_is_asynchronous_where_it_is_installed():
    uvloop = pytest.importorskip("uvloop")

    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert isinstance(cli.run_async(loop()), uvloop.Loop)


def test_a_traceback_is_shown_only_where_it_is_asked_for():
    command = click.command("broken")(cli.run_command(raising(KeyError("x"))))
    root = click.Group("floe", commands=[command], params=[click.Option(["--debug"], is_flag=True)])
    for words, variable, is_shown in (("broken", "0", False), ("--debug broken", "0", True), ("broken", "1", True)):
        assert ("Traceback" in CliRunner().invoke(root, words.split(), env={"FLOE_DEBUG": variable}).stderr) == is_shown


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    ended = run("version", capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "code", "out"), [("check", 3, "UNKNOWN - interrupted before the check was done\n"), ("status", 130, "")]
)
def test_ctrl_c_while_a_command_is_loaded(command: str, code: int, out: str):
    loading = "importlib.import_module = lambda _name: signal.raise_signal(signal.SIGINT)"
    ended = python("-c", f"import importlib, signal, sys, floe\n{loading}\nsys.argv[1:] = ['{command}']\nfloe.main()")
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, "")


def test_ctrl_c_ends_a_command_that_runs_with_130_and_without_a_word():
    cleaned_up = []

    async def body() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            cleaned_up.append(True)

    assert (end(body), cleaned_up) == ((130, "", ""), [True])


def test_ctrl_c_at_a_question_ends_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(click, "confirm", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    answered = []

    async def ask() -> None:
        answered.append(cli.confirm("go on?", False))

    with pytest.raises(KeyboardInterrupt):
        cli.run_async(ask())
    assert answered == []


# Options, types, output


@click.command()
@cli.config_option
@cli.json_option
@cli.run_command
def show_config(config: str, as_json: bool) -> None:
    click.echo(f"{config} {as_json}")


def test_the_configuration_comes_from_the_option_the_environment_or_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    default = tmp_path / "floe.yaml"
    monkeypatch.setattr(cli_module, "DEFAULT_CONFIG", default)

    def shown(words: str = "", environment: str = "") -> str:
        return CliRunner().invoke(show_config, words.split(), env={"FLOE_CONFIG": environment}).output

    assert f"-c FILE, FLOE_CONFIG or {default}; found none of them" in shown()
    default.touch()
    assert (shown(), shown("-c a.yaml --json", "b.yaml")) == (f"{default} False\n", "a.yaml True\n")
    assert shown("", "b.yaml") == "b.yaml False\n"


def test_every_command_takes_its_file_by_one_option(folder: Path):
    (folder / "c.yaml").write_text(f"store: {{url: file://{folder}/store}}\nsite: us\n")
    ended = run_here("config", "check", "-c", "c.yaml")
    assert (ended.code, ended.out.startswith("c.yaml:1: ok")) == (0, True), ended
    (folder / "store").mkdir()
    assert run_here("segments", "ls", "-c", "c.yaml", "--json") == Done(0, "[]\n", "")
    missing = "error[E-CONFIG]: none.yaml: expected a file that can be read, found: no such file or directory\n"
    assert run_here("config", "check", "-c", "none.yaml") == Done(78, "", missing)


def test_the_folder_of_a_store_is_created_once(folder: Path):
    (folder / "c.yaml").write_text(f"store: {{url: file://{folder}/a/store}}\n")
    assert run_here("segments", "ls", "-c", "c.yaml").code == 75
    for outcome in ("created", "exists already"):
        assert run_here("store", "create", "-c", "c.yaml") == Done(0, f"file://{folder}/a/store: {outcome}\n", "")
    (folder / "a" / "store").rmdir()
    (folder / "a" / "store").write_text("a file")
    (folder / "below.yaml").write_text(f"store: {{url: file://{folder}/a/store/b}}\n")
    for words in ("store create -c c.yaml", "store create -c below.yaml", "status -c below.yaml"):
        ended = run_here(*words.split())
        assert (ended.code, f"found a file: {folder}/a/store; correct" in ended.err) == (78, True), ended


@pytest.mark.parametrize("place", ["c.yaml", "c.yaml/below", "/proc/below"])
def test_a_folder_for_output_that_cannot_be_made_is_a_wrong_call(place: str, folder: Path):
    (folder / "c.yaml").write_text(f"store: {{url: file://{folder}}}\n")
    ended = run_here("site", "add", "us", "-c", "c.yaml", "--output", place)
    assert (ended.code, f"--output {place}: expected a folder" in ended.err) == (2, True), ended


# floe version, floe completion


def test_the_version_names_what_floe_runs_on():
    found = run_here("version", "--json").json()
    assert (found["floe"], found["python"]) == ("0.2.0.dev0", sys.version.split()[0])
    assert all(found[name] for name in ("nats-py", "pyarrow"))
    assert found["native"] in (None, "frames, compose")
    assert f"pyarrow  {found['pyarrow']}\n" in run_here("version").out
    assert run_here("--version").out.startswith("floe 0.2.0.dev0 (Python 3.")


def test_commands_and_options_are_completed_in_each_shell():
    words = {"_FLOE_COMPLETE": "bash_complete", "COMP_WORDS": "floe segments ls --cov", "COMP_CWORD": "3"}
    ended = run(env={**os.environ, **words})
    assert (ended.stdout, ended.stderr) == ("plain,--cover\n", "")
    for shell in ("bash", "zsh", "fish"):
        assert f"_FLOE_COMPLETE={shell}_complete" in run_here("completion", shell).out


TIMES = [
    ("2026-01-02T03:04:05+01:00", cli.RequestedTime("2026-01-02T03:04:05+01:00")),
    ("-2h", cli.RequestedTime(seconds_ago=7200)),
    ("1h 30m ago", cli.RequestedTime(seconds_ago=5400)),
]


@pytest.mark.parametrize(("text", "moment"), TIMES)
def test_a_time_has_many_forms(text: str, moment: cli.RequestedTime):
    assert cli.RequestedTime.parse(text) == moment
    assert moment.at(10_000) == (parse_time(moment.text) if moment.text else (10_000 - moment.seconds_ago) * 10**9)


def test_what_is_no_time_is_refused():
    assert parse_time("0001-01-01T00:00:00Z") == -62_135_596_800 * 10**9, "as servers write that there is none"
    odd = ("", "yesterday", "2h from now", "5", "2026-13-01T00:00:00Z", "ago", "--2h", "1969-12-31T23:59:59Z")
    for text in (*odd, "2026-01-02", "2026-01-02 03:04", "2026-01-02T03:04:05"):  # without a zone
        with pytest.raises(ValueError, match="expected a time such as 2026-01-02T03:04:05Z"):
            cli.RequestedTime.parse(text)


@click.command()
@click.option("--sequence", type=cli.SequenceType())
@click.option("--age", type=cli.Duration(), default="5m")
@click.option("--size", type=cli.Size(), default="1M")
def typed(sequence: int | None, age: float, size: int) -> None:
    click.echo(f"{sequence} {age} {size}")


PARAMETERS = [
    ("", 0, "None 300.0 1048576\n"),
    ("--sequence 9223372036854775807 --age 1h30m --size 64K", 0, "9223372036854775807 5400.0 65536\n"),
    ("--sequence 0", 2, "expected a sequence from 1 to 9223372036854775807, found '0'"),
    ("--sequence 9223372036854775808", 2, "expected a sequence from 1"),
    ("--sequence ٣", 2, "expected a sequence from 1"),
    ("--age 5", 2, "expected a duration such as"),
    ("--size 5X", 2, "expected a size such as"),
]


@pytest.mark.parametrize(("words", "code", "shown"), PARAMETERS)
def test_parameters_have_the_units_of_the_configuration_and_others_are_refused(words: str, code: int, shown: str):
    result = CliRunner().invoke(typed, words.split())
    assert (result.exit_code, shown in result.output) == (code, True)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    raw: bytes


def test_json_takes_the_values_of_the_program(capsys: pytest.CaptureFixture[str]):
    cli.print_json({"rows": [Row("é", b"\xff")], "set": {2, 1}, "path": Path("/x"), "pair": (1, None)})
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"rows": [{"name": "é", "raw": "\\xff"}], "set": [1, 2], "path": "/x", "pair": [1, None]}


def test_a_table_is_aligned_harmless_and_plain_and_without_rows_its_header(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    cli.print_table([["a\x1b[31m", 5, None], {"CHAIN": "long name", "LAG": 1200, "WHY": "x"}], ["CHAIN", "LAG", "WHY"])
    cli.print_table([], ["A", "B"])
    assert capsys.readouterr().out == "CHAIN       LAG  WHY\na\\x1b[31m     5  -\nlong name  1200  x\nA  B\n"


# Progress


def test_progress_is_a_line_every_ten_seconds_or_one_that_is_rewritten_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
):
    shown = {}
    for is_terminal in (False, True):
        progress = Progress(is_terminal=is_terminal)
        for at in range(25):
            progress.update(f"at {at}", 100.0 + at)
        progress.print("a note\x1b")
        progress.end_line()
        out, shown[is_terminal] = capsys.readouterr()
        assert out == ""
    assert shown[False] == "at 10\nat 20\na note\\x1b\n"
    assert ("at 24" in shown[True], "\n" in shown[True].partition("at 24")[0]) == (True, False)
    shares = [format_share(*each) for each in ((25, 100, 60), (0, 100, 60), (0, 0, 0))]
    assert shares == [" 25%, 3m left", "  0%", "100%"]


# floe config check


def check(folder: Path, text: str, *options: str) -> tuple[int, str, str]:
    (folder / "f.yaml").write_text(text)
    done = run_here("config", "check", "-c", "f.yaml", *options)
    return done.code, done.out, done.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_config_check_prints_ok_or_all_problems_of_each_document(folder: Path):
    ok = "f.yaml:1: ok (site us-east, 1 feed, 0 targets)\nf.yaml:5: ok (site us-east, 0 feeds, 0 targets)\n"
    assert check(folder, f"{HEAD}egress: {{feeds: [{{stream: A}}]}}\n---\n{HEAD}") == (0, ok, "")
    code, shown, err = check(folder, f"{HEAD}sites: x\n---\n{HEAD}egress: {{lease_ttl: 1}}\n")
    first, second = err.splitlines()
    assert (code, shown, first) == (78, "", "error[E-CONFIG]: f.yaml:3:1: sites: unknown key; did you mean site?")
    assert second.startswith("error[E-CONFIG]: f.yaml:7:21: egress.lease_ttl: expected a duration")
    target = "create: {subjects: [o.>]}, sources: [{site: a, feed: f, subject_prefix: 'fleet.{site}'}]"
    err = check(folder, f"{HEAD}ingress: {{targets: [{{stream: T, {target}}}]}}\n")[2]
    assert "f.yaml:3:52: ingress.targets.0.create.subjects: expected subjects that take those of sources.0" in err


def test_config_check_warns(folder: Path):
    insecure = HEAD + "nats: {tls: {insecure: true}}\n"
    code, _, err = check(folder, insecure)
    first = "warning: egress.nats.tls.insecure: the server's certificate is not checked"
    assert (code, err.splitlines()[0]) == (0, first)


def test_config_check_speaks_json(folder: Path):
    code, shown, _ = check(folder, HEAD + "sites: x\n", "--json")
    place = {"name": "f.yaml", "line": 3, "column": 1, "path": "sites"}
    problems = [{**place, "message": "unknown key; did you mean site?"}]
    expected = {"file": "f.yaml", "ok": False, "documents": [], "problems": problems, "warnings": []}
    assert (code, json.loads(shown)) == (78, expected)
    code, shown, _ = check(folder, HEAD, "--json")
    assert (code, json.loads(shown)["documents"]) == (0, [{"site": "us-east", "feeds": 0, "targets": 0}])


def test_hints_and_workers_go_on_in_the_context_of_the_command_line(folder: Path):
    (folder / "f y").write_text(f"{HEAD}nats: {{url: nats://other:4222, user: u, password: p, connect_timeout: 9s}}\n")
    seen: list[object] = []

    @click.command()
    @cli.config_option
    @cli.run_command
    async def shown(config: str) -> None:
        settings = load_settings(config, quiet=True)
        for nats in (settings.nats, settings.nats_for("egress"), settings.nats_for("ingress")):
            seen.append((nats.context, nats.url, nats.user, nats.connect_timeout))
        seen.append((exits.floe_command("status"), worker_command(config)[-4:]))

    assert CliRunner().invoke(shown, ["-c", "f y", "--context", "a b"]).exit_code == 0
    hint = f"floe status -c '{folder}/f y' --context 'a b'"
    assert seen == [("a b", ("nats://127.0.0.1:4222",), "", 9.0)] * 3 + [(hint, ["-c", "f y", "--context", "a b"])]
    seen.clear()
    assert (CliRunner().invoke(shown, ["-c", "f y"]).exit_code, seen[0]) == (0, ("", ("nats://other:4222",), "u", 9.0))
    assert seen[3] == (f"floe status -c '{folder}/f y'", ["egress", "run", "-c", "f y"])
