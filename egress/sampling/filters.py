"""Which received messages are kept. Reasons for leaving out, in this order: looped, too old, sampled out.

What a reason leaves out is not shown to the next one: a message that is too old never touches the sampler.
Nor does one that claims to have come round (`egress.loops`): it passes, and is compared before it is written.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from common.jetstream.headers import REPLAY, SOURCE, hops, is_replayed
from common.segments.columns import Columns
from egress.batch import chosen
from egress.sifted import LOOPED, SAMPLED_OUT, TOO_OLD, Sifted

if TYPE_CHECKING:
    from egress.loops import Claims
    from egress.sampling.sampler import Choices, Sampler

# From whether a message is kept (1 or 0) to its code, and from its code to whether it is still in question.
_FROM_CHOICE = bytes([SAMPLED_OUT, 0]) + bytes(254)
_IN_QUESTION = bytes([1]) + bytes(255)


class Sieve:
    """Made where a feed has `max_age`, is a relay or is sampled.

    `site`: messages that came through it are left out where `relay` is true. `keep_ns`: messages older than
    this before the newest one seen are left out; 0 keeps all. `newest_ns`: the newest seen so far, 0 if none
    was. `sampler`: None keeps what the others let pass. `claims`: which messages it is not shown. `choices`:
    what it chose of the last batch, if asked.
    """

    def __init__(
        self,
        site: str,
        *,
        relay: bool = False,
        keep_ns: int = 0,
        newest_ns: int = 0,
        sampler: Sampler | None = None,
        claims: Claims | None = None,
    ) -> None:
        self._site, self._relay, self._keep_ns, self._sampler = site, relay, keep_ns, sampler
        self._claims = claims
        self.newest_ns = newest_ns
        self.choices: Choices | None = None

    def saw(self, timestamp_ns: int) -> bool:
        """The source holds a message as new as this; whether older ones are left out because of it."""
        older = self.newest_ns
        self.newest_ns = max(older, timestamp_ns)
        return bool(self._keep_ns) and timestamp_ns - self._keep_ns > older

    def sift(self, columns: Columns) -> Sifted:
        """Judge messages that were received, in sequence order and behind those before; at least one."""
        codes, self.choices = self._codes(columns), None
        if codes is None:
            return self._sampled(columns)
        rest = chosen(columns, codes.translate(_IN_QUESTION))
        if self._sampler is None or not rest.sequences:
            return Sifted(columns, codes, rest)
        sampled = self._sampled(rest)
        return Sifted(columns, _merged(codes, sampled.codes), sampled.kept)

    def _codes(self, columns: Columns) -> bytearray | None:
        """Why messages are left out before sampling, one byte for each; None where none is."""
        old = self._too_old(columns)
        looped = self._looped(columns)
        if not old and not looped:
            return None
        codes = bytearray(len(columns.sequences))
        for places, code in ((old, TOO_OLD), (looped, LOOPED)):
            for place in places:
                codes[place] = code
        return codes

    def _looped(self, columns: Columns) -> list[int]:
        """The places of the messages that this site froze before and no replay brought back."""
        if not self._relay:
            return []
        return [
            place
            for place, block in enumerate(columns.headers)
            if block is not None and SOURCE in block and self._came_round(block)
        ]

    def _came_round(self, block: bytes) -> bool:
        sites = [hop.site for hop in hops(block)]
        back = REPLAY in block and is_replayed(block) and sites[:1] == [self._site]
        return self._site in sites and not back

    def _too_old(self, columns: Columns) -> list[int]:
        """The places of the messages that are too old beside the newest one before them."""
        times = columns.timestamps_ns
        before, self.newest_ns = self.newest_ns, max(self.newest_ns, max(times))
        if not self._keep_ns or min(times) >= self.newest_ns - self._keep_ns:
            return []
        newest = accumulate(times, max, initial=before)
        next(newest)
        pairs = enumerate(zip(times, newest, strict=True))
        return [place for place, (time, seen) in pairs if time < seen - self._keep_ns]

    def _sampled(self, columns: Columns) -> Sifted:
        if self._sampler is None:
            return Sifted.whole(columns)
        claiming = [] if self._claims is None else self._claims.places(columns)
        self.choices = choices = _around(self._sampler, columns, claiming)
        codes = bytes(choices.kept).translate(_FROM_CHOICE)
        return Sifted(columns, codes, chosen(columns, choices.kept, choices.keys))


def _around(sampler: Sampler, columns: Columns, claiming: list[int]) -> Choices:
    """What the sampler chooses of all but those at the places `claiming`, which pass without a key."""
    if not claiming:
        return sampler.fold(columns)
    shown = bytearray(b"\1") * len(columns.sequences)
    for place in claiming:
        shown[place] = 0
    choices = sampler.fold(chosen(columns, shown))
    kept, keys = iter(choices.kept), iter(choices.keys)
    return replace(
        choices,
        kept=bytearray(next(kept) if each else 1 for each in shown),
        keys=[next(keys) if each else None for each in shown],
    )


def _merged(codes: bytearray, rest: bytes | bytearray) -> bytearray:
    """`codes`, with those of `rest` in the places of its zeros."""
    following = iter(rest)
    return bytearray(code or next(following) for code in codes)
