"""`python -m bench [--only PREFIX]`: run the benchmarks, print the table, write `bench/results.json`."""

import click

from bench.archive import BENCHES as ARCHIVE
from bench.egress import BENCHES as EGRESS
from bench.harness import Bench, print_table, save
from bench.ingress import BENCHES as INGRESS
from bench.restore import BENCHES as RESTORE
from bench.scale import BENCHES as SCALE

BENCHES: list[Bench] = [*EGRESS, *INGRESS, *ARCHIVE, *RESTORE, *SCALE]


@click.command()
@click.option("--only", default="", metavar="PREFIX", help="Run only those with names that begin so.")
def main(only: str) -> None:
    """Measure speed and memory beside their floors. Example: python -m bench --only egress.unsampled"""
    done = []
    if not (chosen := [bench for bench in BENCHES if bench.name.startswith(only)]):
        names = ", ".join(bench.name for bench in BENCHES)
        raise click.BadParameter(f"expected the beginning of a name, found {only}; there are {names}")
    for bench in chosen:
        click.echo(f"measuring {bench.name} …", err=True)
        done.append((bench, bench.run()))
    print_table(done)
    save(done)


main()
