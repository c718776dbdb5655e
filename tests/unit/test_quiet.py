"""When the clock of a server may be believed to say how long nothing has come."""

from __future__ import annotations

from egress.sampling.stage import Quiet


def test_a_time_is_believed_once_all_is_folded_in_that_a_later_answer_knows_of() -> None:
    quiet = Quiet()
    quiet.heard(10, 1_000)
    assert quiet.until(10) is None
    quiet.heard(10, 2_000)
    assert quiet.until(9) is None
    assert quiet.until(10) == 1_000
    quiet.heard(10, 3_000)
    assert quiet.until(10) == 2_000


def test_a_deposed_leader_is_found_out() -> None:
    """It answered at 1,000 that nothing had come since 10; its successor knows of 11, which came before."""
    quiet = Quiet()
    quiet.heard(10, 1_000)
    quiet.heard(11, 2_000)
    assert quiet.until(10) is None
    assert quiet.waits(10)
    assert quiet.until(11) == 1_000


def test_what_comes_for_others_does_not_keep_time_from_passing() -> None:
    """A partition of a busy stream: each answer is further than the last, heartbeats follow."""
    quiet = Quiet()
    quiet.heard(100, 1_000)
    assert not quiet.waits(120)
    quiet.heard(200, 2_000)
    assert quiet.until(210) == 1_000
    quiet.heard(300, 3_000)
    assert quiet.until(300) == 2_000


def test_an_answer_that_is_missing_begins_anew() -> None:
    quiet = Quiet()
    quiet.heard(10, 1_000)
    quiet.forget()
    quiet.heard(10, 3_000)
    assert quiet.until(10) is None
