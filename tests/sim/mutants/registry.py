"""The list of mutants, and helpers to make them."""

from collections.abc import Callable
from typing import Any

Change = Callable[[], None]
MUTANTS: dict[str, Change] = {}

#: By mutant, a seed of a world that shows it.
FOUND: dict[str, int] = {
    "account_listed_only_once": 50, "acknowledged_before_the_put": 24, "acknowledged_too_far": 19,
    "acknowledgements_never_sent": 2,
    "answers_mixed_up": 1, "archive_never_looked_at_again": 39, "busy_taken_for_a_mistake": 9,
    "condition_of_a_key_left_out": 3, "conditions_taken_for_granted": 19, "cover_skips_a_hole": 1,
    "coverage_of_a_merge_too_wide": 2, "decision_ignored": 33, "doubtful_advisories_sent_again": 5,
    "durable_deleted_first": 26, "every_stream_taken_for_the_same": 13, "expected_sequence_left_out": 60,
    "feed_left_out_of_a_mark": 2, "filter_left_out": 1, "first_chains_listed_for_ever": 45, "folded_twice": 5,
    "foreign_messages_counted_as_rows": 22, "gap_in_deliveries_ignored": 6, "growth_of_the_archive_ignored": 1,
    "headers_left_to_act": 2, "heartbeat_believed": 6, "held_messages_thrown_away": 43,
    "incarnation_without_its_end": 83, "inputs_deleted_before_the_output": 2, "intent_not_stored": 6,
    "intent_taken_for_done": 16, "intent_thrown_away": 6, "leftover_of_a_restore_kept": 131,
    "lost_put_taken_for_done": 14, "lost_save_taken_for_done": 49, "mark_before_the_put": 20, "merge_loses_a_row": 2,
    "next_incarnation_behind_the_old_end": 23, "nothing_folded_again": 35, "one_more_counted_as_stored": 22,
    "position_one_too_far": 1, "proposal_one_too_far": 13, "read_on_behind_the_source": 1, "recorded_tail_believed": 17,
    "redelivered_written_again": 6, "refusal_taken_for_done": 22, "repeated_headers_dropped": 1,
    "restored_without_a_guard": 1, "retention_without_needs": 72, "rows_of_former_positions_kept": 1,
    "rows_sent_again_after_a_doubt": 26, "sampler_begins_anew": 5, "sampler_rebuilt_always": 5,
    "schedule_forgets_chains": 45, "segment_read_from_its_beginning": 13, "silence_taken_for_an_acknowledgement": 2,
    "site_left_out_of_a_position": 2, "size_of_requests_never_learnt": 29, "snapshot_without_its_advisories": 5,
    "state_written_unconditionally": 256, "time_in_seconds": 1, "unknown_advisory_taken_for_told": 195,
    "unread_sequences_not_counted": 30,
}  # fmt: skip

#: Mutants that no world finds, and why.
NOT_FOUND: dict[str, str] = {
    "lease_never_ends": "rightly: leases save work and guard nothing (I9)",
    "tail_never_written": "rightly: heartbeats of egress name the end too, within two minutes",
}


def mutant(make: Change) -> Change:
    """List the mutant by its name. Its docstring names the rule that it breaks."""
    MUTANTS[make.__name__] = make
    return make


def change(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the attribute by the result of `make`, which gets the original."""
    setattr(owner, name, make(getattr(owner, name)))


def changing(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace the attribute, a function, by the decorated one, which gets the original before its own arguments."""

    def decorate(made: Callable[..., Any]) -> Callable[..., Any]:
        change(owner, name, lambda original: lambda *given, **named: made(original, *given, **named))
        return made

    return decorate
