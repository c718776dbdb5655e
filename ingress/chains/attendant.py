"""Looks after the chains of a target that do not run: paused by an operator, or stopped by what was found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from common.chain import Chain
from common.clock import Clock
from common.errors import FloeError, Stopped
from common.service.logs import get_logger
from common.service.pasting import ways
from ingress import hints
from ingress.chains.chain_state import Lane
from ingress.chains.pauses import Pauses
from ingress.chains.roster import Roster
from ingress.rows.prepare import Shape

log = get_logger("ingress.chains.attendant")

ATTEND = 2.0  # seconds between two looks at what operators have decided
LOOK_AT_STOPPED = 60.0  # seconds until a chain that stopped is looked at again

AskShape = Callable[[], Awaitable[Shape]]


class Decisions(Protocol):
    """Who knows what operators have decided (`ingress.chains.pauses.PauseStore`)."""

    async def read(self) -> Pauses: ...


class Attendant:
    """Keeps the lanes' `paused` and `stopped` as they are to be.

    `shape`: asks the target anew what it takes, for chains that stopped because of it (None: it never
    changes). `decisions`: which chains are paused (None: none ever is). `look_at_stopped`: seconds. `wake`:
    has a lane looked at. `hold`: drops what is ready of a lane, and makes it anew behind what was taken.
    """

    def __init__(
        self,
        target: str,
        roster: Roster,
        clock: Clock,
        shape: AskShape | None,
        decisions: Decisions | None,
        look_at_stopped: float,
        *,
        wake: Callable[[Lane], None],
        hold: Callable[[Lane], Lane],
    ) -> None:
        self._target, self._roster, self._clock = target, roster, clock
        self._ask_shape, self._decisions, self._look_at_stopped = shape, decisions, look_at_stopped
        self._wake, self._hold = wake, hold
        self._decided: Pauses | None = None if decisions else Pauses()
        self._unread = ""  # why the decisions could not be read the last time

    @property
    def is_informed(self) -> bool:
        """Whether it is known which chains are paused; before, none may run."""
        return self._decided is not None

    async def run(self) -> None:
        """Look after them for ever."""
        while True:
            await self._clock.sleep(ATTEND)
            await self.attend()

    async def attend(self) -> None:
        """See what operators have decided, and look again at what has been stopped for long enough."""
        await self.read()
        now = self._clock.monotonic()
        await self._retry([lane for lane in self._roster if lane.stopped and now >= lane.retry_at])

    async def begin(self) -> None:
        """Return when it is known which chains are paused. Raises Stopped where that value is spoiled."""
        while not self.is_informed:
            await self.read()
            if not self.is_informed:
                await self._clock.sleep(ATTEND)

    async def read(self) -> None:
        """Take over what is decided; it stays as it was where that cannot be read now."""
        if self._decisions is None:
            return
        try:
            decided = await self._decisions.read()
        except FloeError as error:
            if self._decided is None and isinstance(error, Stopped):
                raise
            self._tell_unread(str(error))
            return
        self._unread = ""
        former, self._decided = self._decided or Pauses(), decided
        self.mark(self._roster)
        if former != decided:
            await self._retry(lane for lane in self._roster if _is_asked_for(lane.chain, former, decided))

    def _tell_unread(self, why: str) -> None:
        if why != self._unread:
            log.warning("decisions not readable", action="decisions", target=self._target, error=why)
        self._unread = why

    def mark(self, lanes: Iterable[Lane]) -> None:
        """Have `lanes` paused or not as it is decided."""
        for lane in lanes:
            paused = self._decided is not None and lane.chain in self._decided.paused
            if paused == lane.paused:
                continue
            what = "chain paused" if paused else "chain resumed"
            log.info(what, action="pause", target=self._target, **lane.chain.log_context())
            current = self._hold(lane) if paused else lane
            current.paused = paused
            self._wake(current)

    def stop(self, lane: Lane, error: FloeError) -> None:
        """Nothing more of the lane is carried until it is looked at again; told once for each reason."""
        told = _with_way_out(error, hints.resume(self._target, lane.chain))
        if lane.stop(told, self._clock.monotonic() + self._look_at_stopped):
            context = lane.chain.log_context()
            log.error("chain stopped", action="chain_stopped", error=str(told), code=told.code, **context)

    async def _retry(self, lanes: Iterable[Lane]) -> None:
        """Look again at chains, by what the target takes now."""
        wanted = list(lanes)
        if any(lane.stopped for lane in wanted) and not await self._reshape():
            return
        for lane in wanted:
            if self._roster.get(lane.chain) is lane:
                lane.retry(self._clock.monotonic() + self._look_at_stopped)
                self._wake(lane)

    async def _reshape(self) -> bool:
        """Prepare rows for the target as it is now; whether that could be asked."""
        if self._ask_shape is None:
            return True
        try:
            self._roster.reshape(await self._ask_shape())
        except FloeError as error:
            log.warning("target not readable", action="shape", target=self._target, error=str(error))
            return False
        return True


def _is_asked_for(chain: Chain, former: Pauses, decided: Pauses) -> bool:
    """Whether an operator has just resumed the chain."""
    return chain in decided.resumed and decided.resumed[chain] != former.resumed.get(chain)


def _with_way_out(error: FloeError, look_again: str) -> FloeError:
    """The error; where its hint names no command, with the one that has the chain looked at at once."""
    if "floe " in error.hint:
        return error
    then = ways(("then, to have it looked at at once", look_again))
    told = FloeError(error.message, hint=ways(error.hint, then) if error.hint else then, code=error.code)
    told.exit_code = error.exit_code
    return told
