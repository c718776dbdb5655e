"""Makes components from settings, for the command modules; imports what is heavy only when asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.objects.port import ObjectStore
    from common.segments.documents import ChainStore
    from common.segments.store import SegmentStore
    from common.settings.root import Settings


def load_settings(path: str, *, quiet: bool = False) -> Settings:
    """The configuration at `path`, in the context that `--context` names, with logs set up as it says.

    Raises ConfigError.

    `quiet`: for a command that ends by itself and prints its result; where the configuration names no level, it logs
    from warning up (`--debug` still counts).
    """
    import socket

    from common import exits, logs
    from common.settings import loader

    document = loader.load_document(path)
    settings = document.settings.in_context(exits.asked_context())
    exits.remember(path)
    is_named = "level" in settings.log.model_fields_set
    level = "warning" if quiet and not is_named and not exits.is_debug() else settings.log.level
    logs.configure(level, settings.log.format, instance=settings.instance or socket.gethostname())
    for warning in document.warnings:
        logs.get_logger("common.config").warning(warning, action="config_warning")
    return settings


def open_store(settings: Settings, objects: ObjectStore | None = None) -> SegmentStore:
    """`objects`, if given, is used instead of opening the configured store again."""
    from common.objects.open import open_objects
    from common.segments.keys import Layout
    from common.segments.store import SegmentStore

    return SegmentStore(
        objects or open_objects(settings.store),
        Layout(settings.store.prefix),
        spool_dir=Path(settings.spool_dir) if settings.spool_dir else None,
        subject_statistics=settings.store.subject_statistics,
    )


def open_chains(settings: Settings, objects: ObjectStore | None = None) -> ChainStore:
    from common.objects.open import open_objects
    from common.segments.documents import ChainStore
    from common.segments.keys import Layout

    return ChainStore(objects or open_objects(settings.store), Layout(settings.store.prefix))
