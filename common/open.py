"""Construction of components from settings, for the command modules; heavy modules are imported only on use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import exits, logs
from common.archive.keys import Layout
from common.errors import ConfigError, UsageError
from common.objects.open import VIEW_TIMEOUT_S, open_objects
from common.service.process import on_hangup

if TYPE_CHECKING:
    from common.archive.documents import ChainStore, PutOnceClaims
    from common.archive.store import SegmentStore
    from common.objects.port import ObjectStore
    from common.settings.root import Settings


def load_settings(path: str, *, quiet: bool = False) -> Settings:
    """Read the configuration at `path`, in the context that `--context` names, and set up logs as it requires.

    Raises ConfigError; UsageError for an invalid name of a context.

    `quiet`: for a command that ends by itself. Unless `-v` or `--debug` is given it has no log: warnings and errors
    come as lines for people.
    """
    from common.settings import loader

    document = loader.load_document(path)
    try:
        settings = document.settings.with_nats_context(name := exits.requested_context())
    except ValueError:  # not a ConfigError: the name is checked before any file is read
        raise UsageError(f"--context: expected the name of a context, found {name!r:.80}") from None
    exits.set_config(path)
    is_plain = quiet and not exits.is_verbose()
    level, form = ("warning", "plain") if is_plain else (settings.log.level, settings.log.format)
    logs.configure(level, form, instance=settings.instance or socket.gethostname())
    for warning in document.warnings:
        logs.get_logger("common.config").warning("configuration warned", action="configuration_warned", text=warning)
    return settings


class ConfigReload:
    """SIGHUP handler for the configuration of a running service: it reads and checks the file again.

    A change that can take effect at once does; each other key that changed is logged as one that needs a restart.

    Secrets are read again by themselves (`common.settings.types`), and shown nowhere.
    """

    def __init__(self, path: str, settings: Settings) -> None:
        self._path, self._settings = path, settings

    def __call__(self) -> None:
        """Read the file again. An invalid file changes nothing; its problems are logged, one in each line."""
        from common.settings import loader

        log = logs.get_logger("common.config")
        try:
            settings = loader.load_document(self._path).settings.with_nats_context(exits.requested_context())
        except ConfigError as error:
            former = "the former configuration stays in use"
            log.error("configuration refused", action="configuration_refused", file=self._path, hint=former)
            for problem in error.problems:
                log.error("configuration problem found", action="configuration_problem_found", error=problem)
            return
        changes = loader.changed_keys(self._settings, settings)
        taken = [key for key in changes if key in RELOADABLE_KEYS]
        for key, (before, now) in changes.items():
            if key not in taken:
                hint = {"hint": f"{key}_file is read again without one"} if now == loader.A_SECRET else {}
                log.warning("restart required", action="restart_required", key=key, before=before, now=now, **hint)
        if "log.level" in taken:
            logs.set_level(settings.log.level)
            log_settings = self._settings.log.model_copy(update={"level": settings.log.level})
            self._settings = self._settings.model_copy(update={"log": log_settings})
        left = len(changes) - len(taken)
        log.warning("configuration reloaded", action="configuration_reloaded", taken=taken, restart=left)


RELOADABLE_KEYS = ("log.level",)


@contextmanager
def reload_on_hangup(path: str, settings: Settings) -> Iterator[None]:
    """Make SIGHUP read the configuration at `path` again, within the block. `settings`: the values in use."""
    on_hangup.append(reload := ConfigReload(path, settings))
    try:
        yield
    finally:
        on_hangup.remove(reload)


def open_store(settings: Settings, objects: ObjectStore | None = None) -> SegmentStore:
    """Open the segment store, on `objects` if given, else on the configured object store."""
    from common.archive.store import SegmentStore

    return SegmentStore(
        objects or open_objects(settings.store, creates=False),
        Layout(settings.store.prefix),
        spool_dir=Path(settings.spool_dir) if settings.spool_dir else None,
        subject_statistics=settings.store.subject_statistics,
        storage_classes={level.to: level.storage_class for level in settings.compaction.levels if level.storage_class},
    )


def open_for_work(settings: Settings) -> tuple[SegmentStore, ChainStore]:
    """Open the store for a command that works on it: it waits as services do, and logs requests without an answer."""
    objects = open_objects(settings.store, log_waits=True, creates=False)
    return open_store(settings, objects), open_chains(settings, objects)


def open_for_view(settings: Settings) -> tuple[SegmentStore, ChainStore]:
    """Open the store for a command that somebody waits for: it fails after some ten seconds without an answer."""
    objects = open_objects(settings.store, timeout=VIEW_TIMEOUT_S, creates=False)
    return open_store(settings, objects), open_chains(settings, objects)


def open_chains(
    settings: Settings, objects: ObjectStore | None = None, claims: PutOnceClaims | None = None
) -> ChainStore:
    from common.archive.documents import ChainStore

    return ChainStore(objects or open_objects(settings.store, creates=False), Layout(settings.store.prefix), claims)
