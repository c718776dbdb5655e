"""CI gives a second try to what may fail by chance, and to nothing else."""

from __future__ import annotations

import pytest

from tests.support.kinds import verdict
from tests.support.suite import counted


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ({"a": "real"}, ""),
        ({"a": "real", "b": "real"}, ""),
        ({"a": "real", "b": "real", "c": "real"}, "3 tests failed: expected at most 2 for a second try"),
        ({"a": "pure"}, "only real tests get a second try: a is pure"),
        ({"a": "real", "b": "simulated"}, "only real tests get a second try: b is simulated"),
        ({}, "no test failed, and yet the run did"),
    ],
)
def test_only_few_real_tests_get_a_second_try(failed: dict[str, str], why: str) -> None:
    assert verdict(failed) == why


def test_this_test_is_pure(request: pytest.FixtureRequest) -> None:
    assert [each.name for each in request.node.iter_markers() if each.name in ("pure", "real", "simulated")] == ["pure"]


@pytest.mark.simulated
async def test_what_is_marked_runs_in_simulated_time(request: pytest.FixtureRequest) -> None:
    import asyncio
    import time as real

    began = real.perf_counter()
    await asyncio.sleep(500)
    assert real.perf_counter() - began < 60


@pytest.mark.parametrize(
    ("line", "passed", "failed"),
    [
        ("== 6524 passed, 19 skipped in 700.12s (0:11:40) ==", 6524, 0),
        ("== 1 failed, 6524 passed, 2 errors in 700.12s ==", 6524, 3),
        ("nothing", 0, 0),
    ],
)
def test_a_run_is_counted_by_the_last_line_of_pytest(line: str, passed: int, failed: int) -> None:
    assert counted(line, 700.4) == {"seconds": 700, "passed": passed, "failed": failed}
