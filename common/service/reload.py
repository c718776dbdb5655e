"""Reload of the configuration of a running process on SIGHUP. A plan of the changes comes first.

All or nothing: if the file is invalid, or a key has changed that needs a restart, everything stays as it is.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common import exits, logs
from common.clock import SystemClock
from common.errors import ConfigError
from common.metrics import gauge
from common.service.process import on_hangup
from common.settings.loader import A_SECRET, ConfigDocument, changed_keys, load_document
from common.settings.root import Settings
from common.tasks import record_unexpected, report_errors

log = logs.get_logger("common.config")

reload_succeeded = gauge("config_last_reload_successful", "1 if the last reload was successful, or none was requested.")
reload_time = gauge("config_last_reload_success_timestamp_seconds", "Time of the last successful reload, or the start.")

RELOADABLE_KEYS = ("log.level", "egress.not_archived")
MAX_LOGGED_ENTRIES = 20
# Beginnings of keys that commands do not use, or that their options replace.
COMMAND_SKIPS = ("egress.", "ingress.", "compaction.engine", "compaction.spark.master")


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """Changes of a reload. `refused`: by key that needs a restart, the value in use and that in the file (None: there
    is none); then nothing changes. `taken`: other keys.

    `started`, `ended`, `replaced`: names of entries; a replaced one drains, and begins again with its new settings.
    `hint`: what the ended ones leave, and the commands that remove it.
    """

    refused: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    hint: str = ""


Planner = Callable[[Settings, Settings], ReloadPlan]  # of the settings in use and those in the file


def plan_entries(before: Settings, now: Settings, skip: tuple[str, ...] = (), *entries: dict[str, Any]) -> ReloadPlan:
    """Plan by keys, without those that begin with one of `skip` (none: COMMAND_SKIPS), and by `entries`, those in use
    and those in the file: one that is equal stays.
    """
    (old, new), skip = entries or ({}, {}), skip or COMMAND_SKIPS
    changes = {key: values for key, values in changed_keys(before, now).items() if not key.startswith(skip)}
    if refused := {key: values for key, values in changes.items() if key not in RELOADABLE_KEYS}:
        return ReloadPlan(refused)
    started, ended = (tuple(name for name in one if name not in other) for one, other in ((new, old), (old, new)))
    replaced = tuple(name for name in old if name in new and old[name] != new[name])
    return ReloadPlan({}, tuple(changes), started, ended, replaced)


class ConfigReload:
    """SIGHUP handler that takes over the configuration in the file `path`. `settings`: those in use. `reload`: plans a
    change of them, and begins it unless a key is refused; raises ConfigError as the start of the process does.

    Secrets are read again by themselves, and shown nowhere.
    """

    def __init__(self, path: str, settings: Settings, plan: Planner) -> None:
        self._path, self.settings, self._context = path, settings, exits.requested_context()
        self._reader = ThreadPoolExecutor(1, "reload")
        self.deliver: Callable[..., object] = lambda call, document: call(document)
        self.reload: Callable[[Settings], ReloadPlan] = lambda now: plan(self.settings, now)
        reload_succeeded.set(1)
        reload_time.set(SystemClock().now())

    def __call__(self) -> None:
        """Read the file again, beside other work because a long one takes seconds, and then take it over. Reloads are
        done one after the other.
        """
        take = report_errors(self._take, lambda error: record_unexpected(error, "service", "reload"))
        self._reader.submit(load_document, self._path).add_done_callback(lambda read: self.deliver(take, read))

    def _take(self, read: Future[ConfigDocument]) -> None:
        """Take the file over. Each problem of an invalid file, or each key that is refused, is logged in a line."""
        reload_succeeded.set(0)
        try:
            plan = self.reload(now := read.result().settings.with_nats_context(self._context))
        except ConfigError as error:
            former = "the former configuration stays in use"
            log.error("configuration refused", action="configuration_refused", file=self._path, hint=former)
            for problem in error.problems:
                log.error("configuration problem found", action="configuration_problem_found", error=problem)
            return
        for key, (in_use, in_file) in plan.refused.items():
            hint = f"{key}_file is read again without one" if in_file == A_SECRET else "restart to take it over"
            log.error("reload refused", action="reload_refused", key=key, in_use=in_use, in_file=in_file, hint=hint)
        if plan.refused:
            return
        self.settings = now
        if "log.level" in plan.taken:
            logs.set_level(now.log.level)
        reload_succeeded.set(1)
        reload_time.set(SystemClock().now())
        changes = {name: getattr(plan, name)[:MAX_LOGGED_ENTRIES] for name in ("taken", "started", "ended", "replaced")}
        changes |= {"hint": plan.hint} if plan.hint else {}
        log.warning("configuration reloaded", action="configuration_reloaded", **changes)


def attach(reload: Callable[[Settings], ReloadPlan]) -> None:
    """Let a service carry out the reloads of this process, also one that came before; see `ConfigReload`."""
    for each in [call for call in on_hangup if isinstance(call, ConfigReload)]:
        each.reload, each.deliver = reload, asyncio.get_running_loop().call_soon_threadsafe
        reload(each.settings)
