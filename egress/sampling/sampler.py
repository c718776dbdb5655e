"""The sampler: a pure fold over the messages. The same settings and messages lead to the same choices (I8).

All times are message times in ns, made to run forward (`monotonic_runs`). Nothing here reads a clock. The moment at
which a silent key is forgotten changes no choice: a key that was silent for `inspect_duration` counts as never seen,
and it is forgotten only after message times have advanced that far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import cast

from common.archive.columns import Columns
from egress.advisories.advisory import Advisory, AdvisoryEvent
from egress.sampling.key_table import MAX_INT64, KeyTable, Notice, SamplerState, add_capped, period_ns
from egress.sampling.keys import KeyReader, SamplingSettings


@dataclass(frozen=True, slots=True)
class MessageRun:
    """A run of messages from the place `first` of a batch on, with their times, which never decrease.

    `is_set_back`: the clock was set back before them, to the first of these times.
    """

    first: int
    times: Sequence[int]
    is_set_back: bool


def monotonic_runs(timestamps_ns: Sequence[int], newest_ns: int, tolerance_ns: int) -> list[MessageRun]:
    """Return the batch as consecutive runs of time: nearly always one; none for an empty batch.

    `newest_ns`: the newest time before the batch. A run ends when a time is more than `tolerance_ns` below the newest.
    """
    if timestamps_ns and timestamps_ns[0] >= newest_ns and sorted(timestamps_ns) == timestamps_ns:
        return [MessageRun(0, timestamps_ns, False)]
    times: list[int] = []
    found = [MessageRun(0, times, False)]
    for place, timestamp_ns in enumerate(timestamps_ns):
        if timestamp_ns < newest_ns - tolerance_ns:
            times, newest_ns = [], timestamp_ns
            found.append(MessageRun(place, times, True))
        newest_ns = max(newest_ns, timestamp_ns)
        times.append(newest_ns)
    return [run for run in found if run.times]


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The result for a batch.

    `kept`: 1 for each message that passes, else 0. `keys`: the key of each, None if it has none. `missing`: how many
    have none; `forced`: how many have a force field that is true. `advisories`: in the order of the messages that
    led to them.
    """

    kept: bytearray
    keys: list[str | None]
    missing: int
    forced: int
    advisories: list[Advisory]


class Sampler:
    """The choice of the messages that pass, and the detection of new, silent and returning keys.

    `state`: the state to begin with; None: an empty one. `makes_advisories`: False if advisories are not wanted.
    """

    def __init__(
        self, sampling: SamplingSettings, state: SamplerState | None = None, *, makes_advisories: bool = True
    ) -> None:
        state = state or SamplerState(sampling.duration_ns)
        self._duration, self._warn = sampling.duration_ns, sampling.warn_ns
        self._size_trigger = sampling.size_trigger or MAX_INT64
        self._makes_advisories, self._keys, self._table = makes_advisories, KeyReader(sampling), KeyTable(state)
        #: The newest message time folded in; 0 before the first.
        self.watermark_ns = state.watermark_ns
        self._reset_due_times()

    @property
    def value_count(self) -> int:
        return len(self._table) - self._table.notices.count(Notice.EXPIRE)

    def fold(self, columns: Columns) -> SampledBatch:
        keys, forced = self._keys.read(columns)
        return self.fold_keys(keys, forced, columns.timestamps_ns, list(map(len, columns.payloads)))

    def fold_keys(
        self, keys: list[str | None], forced: list[bool] | None, timestamps_ns: Sequence[int], sizes: Sequence[int]
    ) -> SampledBatch:
        """Fold in messages with keys that are read already. All lists have equal lengths."""
        kept = bytearray(len(keys))
        found: list[Advisory] = []
        for run in monotonic_runs(timestamps_ns, self.watermark_ns, self._duration):
            if run.is_set_back:
                self._handle_set_back(run.times[0], found)
            self._fold_run(run, keys, forced, sizes, kept, found)
            self.watermark_ns = run.times[-1]
        return SampledBatch(kept, keys, keys.count(None), forced.count(True) if forced else 0, found)

    def advance(self, now_ns: int) -> list[Advisory]:
        """Advance time to `now_ns` at least; return the advisories of silent keys, sorted by moment and value.

        `now_ns`: the watermark, or the server's time if the source holds nothing newer. Cheap if nothing is due; else
        it scans the whole table.
        """
        now_ns = max(now_ns, self.watermark_ns)
        is_nothing_due = not self._makes_advisories or now_ns < self._next_advisory_ns
        if is_nothing_due and self.watermark_ns < self._next_forget_ns:
            return []
        return self._report_silent(now_ns)

    def mark_all_seen(self, at_ns: int) -> None:
        """Mark every known key as seen at `at_ns` or later, and without a notice.

        Call it after `learn`: then the silence of a key counts from `at_ns`, and old keys are not all reported at once.
        """
        table = self._table
        for place, seen in enumerate(table.seen):
            if seen < at_ns:
                table.seen[place] = at_ns
        table.notices[:] = bytes(len(table.notices))
        self._reset_due_times()

    def learn(self, keys: Sequence[str | None], timestamps_ns: Sequence[int], sizes: Sequence[int]) -> None:
        """Learn messages that passed before, in their order: each key was seen and copied then. No advisories."""
        forced = [True] * len(keys)
        makes_advisories, self._makes_advisories = self._makes_advisories, False
        self.fold_keys(list(keys), forced, timestamps_ns, sizes)
        self._makes_advisories = makes_advisories
        self._reset_due_times()

    def freeze(self) -> SamplerState:
        """Return the current state as a value. It takes some milliseconds for a million keys."""
        return self._table.freeze(self._duration, self.watermark_ns)

    def _fold_run(
        self,
        run: MessageRun,
        keys: list[str | None],
        forced: list[bool] | None,
        sizes: Sequence[int],
        kept: bytearray,
        found: list[Advisory],
    ) -> None:
        first, last = run.first, run.first + len(run.times)
        is_whole_batch = last - first == len(keys)
        forces: Iterable[bool] = repeat(False) if forced is None else forced[first:last]
        table, duration, size_trigger = self._table, self._duration, self._size_trigger
        # Without advisories, silence does not matter: after a long one the key is due anyway.
        warn_ns = self._warn if self._makes_advisories else MAX_INT64
        place_of, seen_at, due_at = table.places.get, table.seen, table.due
        size_of, notice_of = table.sizes, table.notices
        messages = zip(
            range(first, last),
            # None is never a key of the table.
            cast(list[str], keys if is_whole_batch else keys[first:last]),
            run.times,
            sizes if is_whole_batch else sizes[first:last],
            forces,
            strict=False,
        )
        for number, key, now, size, is_kept in messages:
            if (place := place_of(key)) is None:
                kept[number] = 1
                if key is not None:
                    self._add_key(key, now, size, found)
                continue
            if now - seen_at[place] > warn_ns or notice_of[place]:
                is_kept = self._handle_return(key, place, now, found) or is_kept
            seen_at[place] = now
            before = size_of[place]
            if size != before:
                size_of[place] = size
                is_kept = is_kept or not before or abs(size - before) >= size_trigger
            if is_kept or now >= due_at[place]:
                kept[number] = 1
                due_at[place] = add_capped(now, period_ns(key, duration))

    def _add_key(self, key: str, now: int, size: int, found: list[Advisory]) -> None:
        self._table.add(key, now, add_capped(now, period_ns(key, self._duration)), size)
        self._note_due(now)
        if self._makes_advisories:
            found.append(Advisory(AdvisoryEvent.NEW, key, now, now))

    def _handle_return(self, key: str, place: int, now: int, found: list[Advisory]) -> bool:
        seen, notice = self._table.seen[place], self._table.notices[place]
        unknown = now - seen >= self._duration
        self._table.notices[place] = Notice.NONE
        self._note_due(now)
        if self._makes_advisories:
            if notice == Notice.NONE:
                found.append(Advisory(AdvisoryEvent.TIMEOUT, key, seen, add_capped(seen, self._warn)))
            if unknown and notice < Notice.EXPIRE:
                found.append(Advisory(AdvisoryEvent.EXPIRE, key, seen, add_capped(seen, self._duration)))
            if unknown or notice == Notice.EXPIRE:
                found.append(Advisory(AdvisoryEvent.NEW, key, now, now))
            else:
                found.append(Advisory(AdvisoryEvent.RECOVER, key, seen, now))
        return unknown

    def _report_silent(self, now_ns: int) -> list[Advisory]:
        table, found = self._table, list[Advisory]()
        # The server's time only leads to advisories. If it made keys be forgotten, choices would depend on a clock
        # other than that of the messages.
        forget = self.watermark_ns - self._duration
        timeout, expire = forget, forget
        if self._makes_advisories:
            timeout, expire = now_ns - self._warn, now_ns - self._duration
        for place in table.due_places(timeout, expire, forget):
            key, seen, notice = table.key(place), table.seen[place], table.notices[place]
            if self._makes_advisories and notice == Notice.NONE and seen < timeout:
                found.append(Advisory(AdvisoryEvent.TIMEOUT, key, seen, add_capped(seen, self._warn)))
                table.notices[place] = Notice.TIMEOUT
            if self._makes_advisories and notice < Notice.EXPIRE and seen <= expire:
                found.append(Advisory(AdvisoryEvent.EXPIRE, key, seen, add_capped(seen, self._duration)))
                table.notices[place] = Notice.EXPIRE
            if seen <= forget:
                table.forget(place)
        # Nothing is due before these times, even if messages of known keys come meanwhile.
        unreported_ns, timed_out, least = table.oldest_seen()
        self._next_advisory_ns = min(unreported_ns + self._warn + 1, timed_out + self._duration)
        self._next_forget_ns = least + self._duration
        found.sort(key=lambda advisory: (advisory.event_time_ns, advisory.value))
        return found

    def _handle_set_back(self, to_ns: int, found: list[Advisory]) -> None:
        """Handle a clock that was set back: times after `to_ns` count as `to_ns`.

        Keys that are due at the watermark are handled first, so that the time of the last call of `advance` does not
        matter.
        """
        table, duration = self._table, self._duration
        found.extend(self._report_silent(self.watermark_ns))
        for key, place in table.places.items():
            if table.seen[place] > to_ns:
                table.seen[place] = to_ns
                table.notices[place] = Notice.NONE
                table.due[place] = min(table.due[place], add_capped(to_ns, period_ns(key, duration)))
        self.watermark_ns = to_ns
        self._reset_due_times()

    def _reset_due_times(self) -> None:
        self._next_advisory_ns = self._next_forget_ns = 0

    def _note_due(self, now: int) -> None:
        self._next_advisory_ns = min(self._next_advisory_ns, now + self._warn + 1)
        self._next_forget_ns = min(self._next_forget_ns, now + self._duration)
