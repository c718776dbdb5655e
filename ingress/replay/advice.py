"""What an operator does about a replay that stopped: complete commands to paste."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace

from common.chain import Chain
from common.sequences import SequenceRange
from common.service.pasting import command
from ingress.chains.advice import accept
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

    def anew(self, *more: str) -> str:
        """Empty the target and begin again: two commands."""
        return f"empty the target ({self.empty}), and begin anew: {self.same('--again', *more)}"

    @property
    def empty(self) -> str:
        """The command that empties the target."""
        return f"nats stream purge {shlex.quote(self.request.target)} --force"

    def source(self, name: str) -> str:
        """The stream that the feed was frozen from is `name` (empty: nobody knows), not the target."""
        without = replace(self, request=replace(self.request, into_source=False))
        left = f"replay into {self.request.target}, which is another stream: {without.same()}"
        if not name:
            return left
        named = replace(self, request=replace(self.request, target=name))
        return f"replay into the source: {named.same()}; or {left}"

    def holes(self, chain: Chain, holes: tuple[SequenceRange, ...]) -> str:
        """Sequences that no segment covers."""
        given_up = " && ".join(accept(chain, hole) for hole in holes[:SHOWN])
        without = self.same("--skip-holes")
        return f"put the segments back; or give the sequences up for good: {given_up}; or go on: {without}"

    def refused(self, code: str) -> str:
        """A row that the target does not take."""
        name, again = shlex.quote(self.request.target), self.same()
        if code == "E-SUBJECT":
            edit = f"nats stream edit {name} --subjects SUBJECTS"
            other = f"{self.request.target}_ALL"
            wide = replace(self, request=replace(self.request, target=other, prefix=other, into_source=False))
            return (
                f"let the target take it ({edit}), and go on: {again}; or replay into a stream that takes "
                f"everything below a prefix: {wide.same('--create')}"
            )
        edit = f"nats stream edit {name} --max-msg-size=-1 --force"
        return f"raise the target's limit ({edit}) or max_payload of its server, and go on: {again}"
