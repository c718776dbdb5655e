"""`floe advisories`: who was seen when."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from common.service.cli import Duration, config_option, run_command

if TYPE_CHECKING:
    from common.settings.root import Role, Settings
    from egress.advisories.search import Search


@click.command()
@click.argument("stream")
@click.argument("value", required=False)
@config_option
@click.option(
    "--since", type=Duration(), default="1h", show_default=True, help="How far back, by time of storing."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with those that come, until Ctrl-C.")
@click.option(
    "--nats",
    "role",
    type=click.Choice(["egress", "ingress"]),
    help="Whose connection to use; default: egress where the configuration has feeds, else ingress.",
)
@click.option("-j", "--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
@run_command
async def advisories(
    stream: str, value: str | None, config: str, since: float, follow: bool, role: Role | None, as_json: bool
) -> None:
    """Show the advisories in STREAM, or those of one VALUE: what was new, silent, back, given up.

    Example: floe advisories NODE_DATA_ADVISORIES node1.example.net -c site.yaml --since 5h
    """
    from common.clock import SystemClock
    from common.jetstream.client import connect
    from common.open import load_settings
    from common.service.process import stop_on_signals
    from common.tasks import unless
    from egress.advisories.search import Search, Wanted

    _check_stream(stream)
    settings, clock = load_settings(config, quiet=True), SystemClock()
    client = await connect(settings.nats_for(role or _role(settings)), name="floe advisories", clock=clock)
    search = Search(client, clock, Wanted(stream, value, since, follow), _to_stderr)
    try:
        async with stop_on_signals() as stop:
            await unless(stop, _print(search, as_json))
    finally:
        await client.aclose()
    if search.foreign:
        _to_stderr(f"{search.foreign} messages of {stream} are no advisories")


def _check_stream(stream: str) -> None:
    from common.chain import FEED_PATTERN

    if not FEED_PATTERN.fullmatch(stream):
        raise click.BadParameter(
            f"expected 1 to 255 characters without space . * > / \\, found {stream!r:.60}",
            param_hint="STREAM",
        )


def _role(settings: Settings) -> Role:
    return "egress" if settings.egress.feeds or not settings.ingress.targets else "ingress"


async def _print(search: Search, as_json: bool) -> None:
    from egress.advisories.search import line_of

    async with aclosing(search.documents()) as documents:
        async for document in documents:
            click.echo(_as_json(document) if as_json else line_of(document))


def _as_json(document: Any) -> str:
    import json

    from msgspec import structs

    return json.dumps(structs.asdict(document))  # ASCII: every control character is escaped


def _to_stderr(text: str) -> None:
    from common.service.text import escaped

    click.echo(escaped(text), err=True)
