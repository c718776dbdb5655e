"""An operator: reads from the status page of a process why a feed stopped, and runs the command of its hint."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import click

import egress.decisions_cli
from common.errors import FloeError
from tests.sim.actors import Member
from tests.sim.world import Process, World

COMMANDS: dict[str, click.Command] = {"egress resolve": egress.decisions_cli.resolve}
STOPPED = ("stopped", "waiting")
LOOKS_WITHIN = (3.0, 30.0)  # seconds from a stop until the operator acts
WAITS = 25.0  # seconds more if egress waits by itself: a listing may show missing objects later
AGAIN = 80.0  # least seconds until the operator acts on the same stop again
DIES = 0.3  # chance that the first command is killed
REPEATS = "archived twice"  # before a command that archives some messages again


@cache
def _command(hint: str) -> list[str]:
    """Return the words of the first command of a hint that decides something; empty if there is none."""
    for line in re.findall(r"floe ([^|;,()\n]*)", hint):
        words = shlex.split(line)
        if " ".join(words[:2]) in COMMANDS and any(each.startswith("--") for each in words):
            return words
    return []


class Operator:
    """An operator that reads the status of the egress processes in `members`, and acts on it.

    `has_repeated`: a command was run that, by its hint, archives some messages again. `pause`: seconds between two
    commands.
    """

    def __init__(self, world: World, members: Mapping[str, Member], pause: float = AGAIN) -> None:
        self.world, self._members, self._rng = world, members, world.chance("operator")
        self._pause, self._acted = pause, dict[str, float]()  # the time of the last command, by the hint of the stop
        self._process: Process | None = None
        self._due = 0.0  # time to act on the last stop that was seen
        self.has_repeated, self.ran = False, Counter[str]()
        self.last = ""

    @property
    def is_busy(self) -> bool:
        return self._process is not None

    def stops(self) -> list[dict[str, Any]]:
        """Return the parts of egress that have stopped or wait, and name a command in their status."""
        found = []
        for name, member in self._members.items():
            # Four times a second, so not by making a whole status page. These fields are no functions.
            if name.startswith("egress") and member.is_alive:
                parts = [each for _, each in sorted(member.health._status.items()) if each.get("state") in STOPPED]
                found += [dict(each) for each in parts if _command(each["hint"])]
        return found

    def look(self) -> None:
        """Act if a feed has been stopped for long enough."""
        if self._process is not None:
            self._finish(self._process)
            return
        stops = self.stops()
        if not stops:
            self._due = 0.0
        elif not self._due:
            is_patient = all(stop["state"] == "waiting" for stop in stops)
            self._due = self.world.now + self._rng.uniform(*LOOKS_WITHIN) + (WAITS if is_patient else 0.0)
        elif self.world.now >= self._due:
            self._due = self.world.now + self._pause
            if new := [s for s in stops if self.world.now >= self._acted.get(s["hint"], -AGAIN) + AGAIN]:
                self._run(self._rng.choice(new))

    def _run(self, stop: dict[str, Any]) -> None:
        words = _command(stop["hint"])
        self.world.note(f"operator reads {stop['code']}, runs {shlex.join(words)}")
        self.ran[stop["code"]] += 1
        self._acted[stop["hint"]] = self.world.now
        self.has_repeated |= bool(re.search(REPEATS, stop["hint"].partition(shlex.join(words))[0]))
        self._process = self.world.spawn("operator", lambda: self._paste(words))
        if self.ran.total() == 1 and self._rng.random() < DIES:
            self.world.at(self._rng.uniform(0, 2), self._process.kill)

    async def _paste(self, words: list[str]) -> str:
        """Run the command as it was pasted, with its question answered. Return its exit code or its error."""
        command = COMMANDS[" ".join(words[:2])]
        context = command.make_context(command.name, [*words[2:], "--yes"])
        body = command.callback.__wrapped__  # type: ignore[union-attr]
        with context:
            values = dict(context.params)
        try:
            code = await body(**values)
        except FloeError as error:
            return error.as_text()
        return f"exit {code}"

    def _finish(self, process: Process) -> None:
        if process.alive and not process.task.done():
            return
        if process.alive:
            self.last = process.task.result()
            self.world.note(f"operator is done: {self.last}")
            process.kill()
        self._process = None
