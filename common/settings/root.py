"""The whole configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import model_validator

from common.settings.base import Section, merged, needed, option, plain
from common.settings.compaction import CompactionSettings
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings
from common.settings.nats import NatsSettings
from common.settings.store import StoreSettings
from common.settings.types import Label, Path, SiteName

Role = Literal["egress", "ingress"]


class LogSettings(Section):
    """The log, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = option("info", "what is logged, from here up")
    format: Literal["auto", "json", "text"] = option("auto", "auto: text on a terminal, JSON elsewhere")


class Settings(Section):
    """One document of a configuration file; a site has one, the centre has one, a test has both in one.

    `egress.nats` and `ingress.nats` are whole connections: `nats` with the overrides of the role.
    """

    instance: Label = option("", "a label for logs; empty: the host's name")
    site: SiteName = option("", "this site; needed with `egress.feeds`")
    spool_dir: Path = option(
        "", "where segments are built; empty: the system's folder; nothing in it is needed to resume"
    )
    nats: NatsSettings = option(
        {}, "the connection to NATS; `egress.nats` and `ingress.nats` override it key by key"
    )
    store: StoreSettings = needed("the object store")
    log: LogSettings = option({}, "the log")
    egress: EgressSettings = option({}, "what this site freezes")
    ingress: IngressSettings = option({}, "what flows into which streams")
    compaction: CompactionSettings = option({}, "how segments are merged")

    @model_validator(mode="before")
    @classmethod
    def _with_overrides(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {
            **data,
            **{role: _with_nats(data.get("nats", {}), data.get(role, {})) for role in ("egress", "ingress")},
        }

    def nats_for(self, role: Role) -> NatsSettings:
        """The connection of `role`: `nats` with the role's overrides, key by key."""
        return (self.egress if role == "egress" else self.ingress).nats

    def combinations(self) -> Iterator[tuple[str, str]]:
        if self.egress.feeds and not self.site:
            yield "site", "expected a name where egress has feeds, found none"
        if self.ingress.events and self.store.url.startswith("file:"):
            yield "ingress.events", "expected none beside a file:// store, found some"

    def loops(self) -> Iterator[tuple[str, str]]:
        """Targets that are the source of the very feed that flows into them: they would grow for ever.

        As `combinations`; apart from it because the file with every default shows one stream on both sides.
        """
        if set(self.egress.nats.url).isdisjoint(self.ingress.nats.url):
            return
        streams = {(self.site, feed.name): feed.stream for feed in self.egress.feeds}
        for index, target in enumerate(self.ingress.targets):
            for number, source in enumerate(target.sources):
                if any(streams.get(pair) == target.stream for pair in source.pairs()):
                    key = f"ingress.targets.{index}.sources.{number}"
                    yield (
                        key,
                        f"expected another stream than the target, found {target.stream} frozen by egress",
                    )


def _with_nats(nats: Any, role: Any) -> Any:
    role = plain(role)
    return {**role, "nats": merged(nats, role.get("nats", {}))} if isinstance(role, Mapping) else role
