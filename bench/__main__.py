"""`python -m bench [--only NAME]`: run the benchmarks, print the table, write `bench/results.json`."""

import click

from bench.archive import BENCHES as ARCHIVE
from bench.egress import BENCHES as EGRESS
from bench.harness import Bench, print_table, save
from bench.ingress import BENCHES as INGRESS
from bench.restore import BENCHES as RESTORE
from bench.sampling import BENCHES as SAMPLING

BENCHES: list[Bench] = [*EGRESS, *SAMPLING, *INGRESS, *ARCHIVE, *RESTORE]


@click.command()
@click.option("--only", type=click.Choice([bench.name for bench in BENCHES]), help="Run this one alone.")
def main(only: str | None) -> None:
    """Measure speed and memory beside their floors. Example: python -m bench --only egress.unsampled"""
    done = []
    for bench in BENCHES:
        if only in (None, bench.name):
            click.echo(f"measuring {bench.name} …", err=True)
            done.append((bench, bench.run()))
    print_table(done)
    save(done)


main()
