"""The stream that a restore fills: no other stream is deleted or promoted.

JetStream deletes and updates any stream that has the name. So one restore at a time holds the lease of a name. Before
it deletes or promotes a stream, it checks the stream for its own marker, or that of an earlier restore.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from common.clock import Clock, parse_time
from common.errors import ConfigError, LeaseLost, OutcomeUnknown, Stopped
from common.exits import choices
from common.failpoints import failpoint
from common.logs import get_logger
from common.nats.api import RESTORE_PREFIX, StreamInfo, check_token, create_consumer, delete_stream, stream_info
from common.nats.client import FloeClient
from common.nats.kv import state_key
from common.nats.lease import Lease, Leases, format_owner
from common.nats.requests import ApiError
from common.service.progress import Progress
from common.tasks import Stop, run_with, wait_for
from ingress.errors import most_important_error
from ingress.recovery.history import repeat_command
from ingress.recovery.plan import PROMOTION_KEYS, RestorePlan
from ingress.recovery.preflight import foreign_stream_error, guarded_consumers, running_error, stopped_error
from ingress.recovery.read_back import config_differences, stream_info_json
from ingress.recovery.stream_archive import without_guard_subject

log = get_logger(__name__)

T = TypeVar("T")

SUBSCRIPTION_EXISTS = 10013  # error of an update of `deliver_subject`: a client subscribes to the current one


async def run_with_renewal(lease: Lease, work: Coroutine[Any, Any, T], lost: LeaseLost | None = None) -> T:
    """Return the result of `work`; renew the lease meanwhile. Raises the most important error of both.

    `lost`: raised once the lease is lost; None if the work checks that itself, where it matters.
    """
    results = list[T]()

    async def main() -> None:
        results.append(await work)

    async def renew() -> None:
        await lease.run_renewals()
        if lost is not None:
            raise lost

    try:
        await run_with(main(), renew())
    except BaseExceptionGroup as errors:
        raise most_important_error(errors) from None
    return results[0]


class GuardedStream:
    """The stream of one attempt, from the removal of a leftover to its promotion. `marker`: of this attempt only."""

    def __init__(self, client: FloeClient, plan: RestorePlan, clock: Clock, progress: Progress, stop: Stop) -> None:
        self._client, self._plan, self._name = client, plan, plan.name
        self._clock, self._progress, self._stop = clock, progress, stop
        self._lease: Lease | None = None
        self.marker = secrets.token_hex(8)

    # The lease of its name

    @asynccontextmanager
    async def hold_lease(self, leases: Leases) -> AsyncIterator[Lease]:
        """Hold the lease of the name during the block. Wait until the lease of a killed restore expires."""
        lease = self._lease = await self._acquire_lease(leases)
        try:
            yield lease
        finally:
            self._lease = None
            await lease.release()

    async def _acquire_lease(self, leases: Leases) -> Lease:
        """Acquire the lease. Raises Unavailable if its holder renews it, and so is alive, or if the restore stops."""
        key, seen = state_key("restore", self._name), dict[bytes, int]()
        while (lease := await leases.acquire(key)) is None:
            if (entry := await leases.kv.get(key)) is None:
                continue
            holder = format_owner(entry.value.decode("utf-8", "backslashreplace"))
            if seen and seen != {entry.value: entry.revision}:
                raise running_error(self._name, holder)
            if not seen:
                seen[entry.value] = entry.revision
                self._progress.print(f"stream {self._name}: waiting to see if the restore of {holder} is alive")
            if await wait_for(self._stop, min(0.5, leases.ttl / 10)):
                raise stopped_error(self._plan.request)
        return lease

    def check_lease(self) -> None:
        """Raise LeaseLost if the lease is known to be lost. The check is cheap."""
        if self._lease is not None and self._lease.lost.is_set:
            self._require_lease()

    def _require_lease(self) -> None:
        """Raise LeaseLost if another restore may have begun."""
        if self._lease is not None and not self._lease.is_usable():
            raise LeaseLost(
                f"stream {self._name}: the lease of this restore was lost",
                hint=choices(("the same command begins again", repeat_command(self._plan.request))),
                code="E-RESTORE-LEASE",
            )

    # The stream of that name

    async def remove_leftover(self, checks: int, span_s: float) -> None:
        """Check the name `checks` times over `span_s` seconds, and remove the leftover of an earlier restore.

        The pause is also the time in which a running egress notices that the stream is gone, and puts the rows that it
        holds. Without it, a small stream was restored before that, and lacked them.

        Raises ConfigError if another stream has the name, Unavailable if another restore fills it now.
        """
        states = set[tuple[int, int]]()
        for check in range(checks):
            if check:
                await self._clock.sleep(span_s / (checks - 1))
            if (info := await self._find()) is not None:
                states.add((info.messages, info.last_sequence))
        if len(states) > 1:
            raise running_error(self._name)
        if states:
            self._progress.print(f"removing {self._name}, a leftover of an earlier restore")
            await self.remove("")

    async def remove(self, marker: str) -> None:
        """Remove the stream with this marker; with an empty one, the stream of any restore. Raises LeaseLost,
        ConfigError for a stream without a marker, and the errors of the server.
        """
        info = await self._find()
        if info is not None and info.restore_marker.startswith(marker):
            self._require_lease()
            await delete_stream(self._client, self._name, timeout=30.0)

    async def _find(self) -> StreamInfo | None:
        """Return the stream of this name; None if there is none. Raises ConfigError if no restore made it."""
        info = await stream_info(self._client, self._name)
        if info is not None and not info.restore_marker:
            raise foreign_stream_error(self._plan.request, info)
        return info

    async def read_filled(self) -> StreamInfo:
        """Return the stream that this attempt filled. Its `created` may change with its leader: in a cluster, only the
        server that received the archive reports the time at which it made the stream, or the time that it kept from the
        archive. The other servers report the time of the request.

        Raises Stopped if it is gone, ConfigError if another stream has its name, Unavailable if another restore fills
        the stream of that name.
        """
        if (info := await self._find()) is None:
            raise Stopped(
                f"stream {self._name}: expected the stream just restored, found none: it was deleted",
                hint=choices(("begin again", repeat_command(self._plan.request))),
                code="E-RESTORE-EXISTS",
            )
        if not info.restore_marker.startswith(self.marker):
            raise running_error(self._name)
        return info

    # Promotion

    async def promote(self, filled: StreamInfo, config: Mapping[str, Any]) -> list[str]:
        """Give the stream its final configuration, `config`. `filled`: the stream as it was just before.

        Returns, as text, the keys that only a promotion sets and that the server did not keep. Raises ConfigError if
        the server refuses the configuration, Stopped if another stream got it.
        """
        self._require_lease()
        name, plan = self._name, self._plan
        try:
            await self._client.api(f"STREAM.UPDATE.{check_token(name)}", dict(config), timeout=30.0)
        except OutcomeUnknown:
            if (info := await stream_info(self._client, name)) is None or info.restore_marker:
                raise
        except ApiError as error:
            raise ConfigError(
                f"stream {name}: the server refuses its configuration: {error.description}",
                hint=choices(
                    f"stream {name} is restored and compared, and stays under its guard: no publisher reaches it",
                    ("solve that; the same command removes it and begins again", repeat_command(plan.request)),
                    ("or remove it", f"nats stream rm {shlex.quote(name)}"),
                ),
                code="E-RESTORE-PROMOTE",
            ) from error
        await self._check_promoted(filled)
        log.info("stream restored", action="stream_restored", stream=name, last=plan.last_sequence)
        later = {key: value for key, value in config.items() if key in PROMOTION_KEYS}
        found = (await stream_info_json(self._client, name))["config"]
        return [f"configuration: {text}" for text in config_differences(later, found)]

    async def restore_delivery(self) -> list[str]:
        """Give the push consumers of the promoted stream their own delivery subjects. Return the consumer names.

        Raises ConfigError if the server refuses one because a client subscribes to its subject under the guard, for
        example with `>`.
        """
        guarded, refused = await guarded_consumers(self._client, self._name), list[str]()
        for name, config in guarded.items():
            self._require_lease()
            try:
                found = {**config, "deliver_subject": without_guard_subject(config["deliver_subject"])}
                await create_consumer(self._client, self._name, found, "update")
            except OutcomeUnknown:
                if name in await guarded_consumers(self._client, self._name):
                    raise
            except ApiError as error:
                if error.err_code != SUBSCRIPTION_EXISTS:
                    raise
                refused.append(name)
            failpoint("restore.delivering")
        if refused:
            raise ConfigError(
                f"stream {self._name}: is back and in use, but {', '.join(refused)} cannot deliver yet: expected "
                f"no subscription to {RESTORE_PREFIX}{self._name}.>, found one, such as to `>`",
                hint=choices(("end it for a moment; the same command continues", repeat_command(self._plan.request))),
                code="E-RESTORE-DELIVER",
            )
        return [*guarded]

    async def _check_promoted(self, filled: StreamInfo) -> None:
        """Raise Stopped if another stream than the compared one got the configuration: in a cluster, one that was
        created after `filled` was read.
        """
        info, end, created = await stream_info(self._client, self._name), self._plan.last_sequence, filled.created
        is_it = info is not None and (
            info.created == created or (info.leader and parse_time(info.created) < parse_time(filled.time))
        )
        if info is None or not is_it or info.last_sequence < end:
            found = f"one created {info.created} up to {info.last_sequence}" if info else "none"
            raise Stopped(
                f"stream {self._name}: expected the restored one, created {created} up to {end}, found {found}: "
                "it was replaced while it was promoted",
                hint=choices(
                    "check its messages and its creator; then",
                    ("delete it, and begin again", repeat_command(self._plan.request)),
                ),
                code="E-RESTORE-REPLACED",
            )
