"""What an operator does about a replay that stopped: complete commands to paste."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace

from common.chain import Chain
from common.segments.gaps import BEFORE_GIVING_UP, accept_command
from common.sequences import SequenceRange
from common.service.pasting import command, ways
from ingress.replay.options import Options
from ingress.replay.request import Request

SHOWN = 10  # holes


@dataclass(frozen=True, slots=True)
class Advice:
    """The commands of one replay. `options`: what its command line allowed; each command repeats them."""

    request: Request
    options: Options = field(default_factory=Options)

    def same(self, *more: str) -> str:
        """The command that was given, with the options `more`."""
        words = [self.request.words(), *dict.fromkeys([*self.options.words(), *more])]
        return command("replay", *words)

    def anew(self, before: str = "") -> str:
        """Empty the target and begin again: two commands, one behind the other."""
        return ways((f"{before}empty the target, and begin anew", self.empty, self.same("--again")))

    def not_created(self, *, is_taken: bool) -> str:
        """The server does not make the target; `is_taken`: another stream has its subjects."""
        if not is_taken:
            return ways(("mend what the server names, and give the same command again", self.same()))
        request = self.request
        apart = f"{request.target}_ALL"
        apart += "_2" if request.prefix == apart else ""
        below = replace(self, request=replace(request, prefix=apart, into_source=False))
        taken = "another stream takes these subjects, and no second one can; replay below a prefix of its own"
        return ways((taken, below.same()))

    @property
    def empty(self) -> str:
        """The command that empties the target."""
        return f"nats stream purge {shlex.quote(self.request.target)} --force"

    def source(self, name: str) -> str:
        """The stream that the feed was frozen from is `name` (empty: nobody knows), not the target."""
        without = replace(self, request=replace(self.request, into_source=False))
        left = (f"replay into {self.request.target}, which is another stream", without.same())
        if not name:
            return ways(left)
        named = replace(self, request=replace(self.request, target=name))
        return ways(("replay into the source", named.same()), (f"or {left[0]}", left[1]))

    def holes(self, chain: Chain, holes: tuple[SequenceRange, ...]) -> str:
        """Sequences that no segment covers."""
        given_up = [accept_command(chain, hole) for hole in holes[:SHOWN]]
        last = "only when nobody has them any more, give them up for all targets"
        skip = (f"{BEFORE_GIVING_UP}; or go on without them", self.same("--skip-holes"))
        return ways(skip, (last, *given_up))

    def refused(self, code: str) -> str:
        """A row that the target does not take."""
        name, again = shlex.quote(self.request.target), self.same()
        if code == "E-SUBJECT":
            edit = f"nats stream edit {name} --subjects SUBJECTS"
            other = f"{self.request.target}_ALL"
            wide = replace(self, request=replace(self.request, target=other, prefix=other, into_source=False))
            everything = "or replay into a stream that takes everything below a prefix"
            return ways(
                ("let the target take it, and go on", edit, again), (everything, wide.same("--create"))
            )
        edit = f"nats stream edit {name} --max-msg-size=-1 --force"
        raised = "raise the target's limit, or max_payload of its server, and go on"
        return ways((raised, edit, again))
