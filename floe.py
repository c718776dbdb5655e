"""The command `floe`: it lists the commands of all parts and imports only the one that is called."""

import functools
import gc
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import click


class Entry(NamedTuple):
    """A command: its location (`module:attribute`) and its line in the help."""

    target: str
    help: str


COMMANDS = {
    "egress": Entry("egress.cli:egress", "Archive the streams of a site as segments."),
    "ingress": Entry("ingress.cli:ingress", "Publish archived segments into target streams."),
    "compact": Entry("compaction.cli:compact", "Merge small segments into larger ones."),
    "advisories": Entry("egress.advisories.cli:advisories", "Show the advisories of samplers, from their stream."),
    "fleet": Entry("egress.sampling.fleet:fleet", "List the senders of every site, and when each was last seen."),
    "segments": Entry("common.segments_cli:segments", "List, show and verify segments."),
    "consumers": Entry("common.segments_cli:consumers", "Show the captured positions of consumers."),
    "checkpoint": Entry("ingress.cli:checkpoint", "Show and correct the checkpoints of ingress."),
    "audit": Entry("common.audit:audit", "Show the recorded decisions of operators."),
    "gap": Entry("ingress.operator.decisions_cli:gap", "List holes in the archive, and accept them as gaps."),
    "chain": Entry("ingress.operator.decisions_cli:chain", "Pause single chains, and resume them."),
    "parked": Entry("ingress.operator.decisions_cli:parked", "Show and deliver messages that were too large."),
    "restore": Entry("ingress.recovery.cli:restore", "Restore a lost stream from the archive, as it was."),
    "export": Entry("ingress.recovery.cli:export", "Export an archived stream as a backup of `nats`."),
    "import": Entry("egress.cli:import_backup", "Begin the archive of a feed with a backup of `nats`."),
    "replay": Entry("ingress.recovery.cli:replay", "Publish the archived messages of a feed into a stream."),
    "drill": Entry("ingress.recovery.cli:drill", "Test a replay or restore in a scratch stream."),
    "compare": Entry("ingress.recovery.cli:compare", "Compare the archive of a feed with its living stream."),
    "status": Entry("ingress.cli:status", "Show sites, chains and targets at a glance."),
    "check": Entry("common.check_cli:check", "Report the state of a part in one line, for Nagios and cron."),
    "version": Entry("common.cli:show_version", "Show the versions of Floe, Python and its libraries."),
    "completion": Entry("common.cli:completion", "Print the completion code for a shell."),
    "doctor": Entry("common.doctor_cli:doctor", "Examine store, NATS, Spark and disk, and name remedies."),
    "config": Entry("common.config_cli:config", "Check a configuration."),
    "site": Entry("infra.cli:site", "Make the files of a new site."),
    "store": Entry("infra.cli:store", "Create the bucket of a configuration."),
    "emulate": Entry("infra.cli:emulate", "Publish messages as a fleet of nodes would."),
    "demo": Entry("infra.cli:demo", "Run everything on this host, on loopback."),
}

#: Functions of one part that a command of another calls: the views of `floe status` by section of the configuration,
#: checks of `floe doctor`, `floe config check` and `floe check`, and the server that an import starts.
PART_FUNCTIONS = {
    "egress": "egress.status:site_view", "ingress": "ingress.operator.status:centre_view",
    "target": "ingress.target:examine_target", "spark": "compaction.spark:examine_spark",
    "contradictions": "ingress.preflight:settings_problems", "check egress": "egress.cli:check_egress",
    "check ingress": "ingress.cli:check_ingress", "check compaction": "compaction.cli:check_compaction",
    "server": "infra.local.nats:NatsServer",
}  # fmt: skip

#: Commands that a group of one part gets from another part.
EXTRAS = {"segments": {"verify": "compaction.cli:verify"}}


class LazyGroup(click.Group):
    """A group that imports the module of a command only when that command is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["floe.arguments"] = tuple(args)  # for `common.audit`
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = resolve_name(COMMANDS[cmd_name].target)
        for name, target in EXTRAS.get(cmd_name, {}).items():
            command.add_command(resolve_name(target), name)
        return command  # type: ignore[no-any-return]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Return the commands by name, without importing any of them, and the options."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(n, help=entry.help) for n, entry in COMMANDS.items() if n.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # raised before a command starts, or by one that runs until it is stopped
            ctx.exit(130)
        except click.NoSuchOption as error:
            if error.ctx is None or not isinstance(group := error.ctx.command, click.Group):
                raise
            message = f"{error.message} Name a command before it: {', '.join(group.list_commands(error.ctx))}."
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            if not (close := difflib.get_close_matches(args[0], COMMANDS, n=1)):
                raise
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {close[0]}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from common.metrics import version

        click.echo(f"floe {version()} (Python {sys.version.split()[0]})")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Show the log of a command that ends by itself.")
@click.option("--debug", is_flag=True, help="The same, and tracebacks (FLOE_DEBUG=1).")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context, verbose: bool, debug: bool) -> None:  # noqa: ARG001  (asked of the context)
    """Carry JetStream streams between sites through object storage, and restore them from it.

    The configuration is -c FILE, else FLOE_CONFIG, else /etc/floe/floe.yaml.
    """
    if not gc.isenabled():  # by `main`
        gc.freeze()
        gc.enable()
    ctx.obj = {name: functools.partial(resolve_name, target) for name, target in PART_FUNCTIONS.items()}


def main() -> None:
    gc.disable()  # while modules are loaded, which stay: that is a tenth of the time to start
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file opened would get its descriptor
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115  (to its end)
    # Only egress handles this signal. Its default action would end any other command without a message.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    _check_common_package()
    from common.exits import EXIT_INTERRUPTED, exit_with_code
    from common.imports import hide_package

    words = _command_words(sys.argv[1:])
    if not _uses_spark(words):
        hide_package("pandas")
    if words[:2] in (["egress", "run"], ["ingress", "run"]):
        hide_package("rich")
    if not sys.warnoptions:  # a second Ctrl-C leaves coroutines that are never awaited
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    code = 0
    try:
        with exit_with_code():
            cli(prog_name="floe")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is already ending
        if words[:1] == ["check"]:  # interrupted while its modules were loading
            click.echo("UNKNOWN - interrupted before the check was done")
            code = 3
    _exit_process(code)


def _command_words(arguments: list[str]) -> list[str]:
    """Return the arguments from the name of the command on."""
    return arguments[next((at for at, word in enumerate(arguments) if not word.startswith("-")), len(arguments)) :]


def _uses_spark(words: Sequence[str]) -> bool:
    """True if a command may start Spark. Any other command would import pandas needlessly."""
    return words[:1] == ["demo"] or (words[:1] == ["compact"] and "local" not in words)


def _check_common_package() -> None:
    """Exit with 78 if `common` is from another distribution: many use that name."""
    home = Path(__file__).resolve().parent / "common"
    spec = importlib.util.find_spec("common")
    found = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
    if found != [home]:
        click.echo(
            f"error[E-COMMON]: the package common: expected {home}, found {', '.join(map(str, found)) or 'nowhere'}; "
            "install floe-jetstream in an environment of its own, and unset PYTHONPATH",
            err=True,
        )
        sys.exit(78)


def _exit_process(code: int) -> None:
    """Exit, even if a thread still waits for a server that never answers."""
    if (threads := sys.modules.get("common.service.process")) is not None and threads.count_running_calls():
        from common import logs

        logs.flush()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
