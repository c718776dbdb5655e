"""`floe egress …`: freezes the streams of a site."""

import click

from common.cli import config_option, run_command
from common.lean import slim
from common.open import load_settings
from egress.init import init
from egress.repartition_cli import repartition
from egress.resolve_cli import resolve


@click.group()
def egress() -> None:
    """Freeze the streams of this site into segments."""


egress.add_command(init)
egress.add_command(repartition)
egress.add_command(resolve)


@egress.command()
@config_option
@click.option("--workers", type=click.IntRange(1, 64), help="Processes, instead of `egress.workers`.")
@click.option("--worker", hidden=True, default="", help="Which of them this is; set by their parent.")
@run_command
async def run(config: str, workers: int | None, worker: str) -> int:
    """Freeze until SIGTERM; then store what was read, and end.

    Example: floe egress run -c site.yaml
    """
    from common.logs import always
    from egress.workers.process import WorkerPlace

    slim()
    place = WorkerPlace.parse(worker) if worker else None
    if place:
        always(worker=place.index)
    settings = load_settings(config)
    count = workers or settings.egress.workers
    if count > 1 and place is None:
        from egress.workers.supervisor import run_workers

        return await run_workers(config, settings, count)
    from egress.service import serve

    return await serve(settings, place=place)
