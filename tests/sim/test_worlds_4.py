"""The last quarter of the worlds."""

from tests.sim.command import quarter


def test_the_promises_hold_in_every_world() -> None:
    quarter(4)
