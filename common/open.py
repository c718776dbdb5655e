"""Construction of components from settings, for the command modules; heavy modules are imported only on use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import exits, logs
from common.archive.keys import Layout
from common.errors import UsageError
from common.objects.open import VIEW_TIMEOUT_S, open_objects
from common.service.process import on_hangup

if TYPE_CHECKING:
    from common.archive.documents import ChainStore, PutOnceClaims
    from common.archive.store import SegmentStore
    from common.objects.port import ObjectStore
    from common.service.reload import Planner
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


@contextmanager
def reload_on_hangup(path: str, settings: Settings, plan: Planner | None = None) -> Iterator[None]:
    """Make SIGHUP take over the configuration at `path`, within the block; see `ConfigReload`."""
    from common.service.reload import ConfigReload, plan_entries

    on_hangup.append(reload := ConfigReload(path, settings, plan or plan_entries))
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
    """Open the store for a command that works on it: it waits as services do."""
    objects = open_objects(settings.store, creates=False)
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
