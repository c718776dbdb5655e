"""The whole configuration: store, compaction, log, and lookups of keys."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from common.clock import parse_time
from common.settings import types as t
from common.settings.egress import EgressSettings
from common.settings.ingress import IngressSettings
from common.settings.service import NatsSettings, ServiceSettings
from common.settings.types import Section, find_repeated, merge, needed, option, to_plain

# Characters that need no encoding anywhere. No engine needs more, and most skip names that begin with `_` or `.`.
_PREFIX = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._=-]*(/[A-Za-z0-9-][A-Za-z0-9._=-]*)*")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_STORAGE_CLASS = re.compile(r"[A-Z0-9_-]{1,64}")
#: Storage classes with objects that must be restored before they can be read.
COLD_CLASSES = ("GLACIER", "DEEP_ARCHIVE")
StorageClass = Annotated[t.Text, t.matching(_STORAGE_CLASS, "a storage class such as STANDARD_IA")]


def _cold_problems(storage_class: str) -> Iterator[tuple[str, str]]:
    if storage_class in COLD_CLASSES:
        what = "expected a class whose objects can be read at once, such as STANDARD_IA or GLACIER_IR"
        yield "storage_class", f"{what}, found {storage_class}: Floe reads any segment whenever it needs it"


_ENDPOINT = t.host_url(("https", "http"), "access_key_id and secret_access_key_file", or_empty=True)


class StoreTlsSettings(Section):
    """TLS to the object store."""

    ca: t.Path = option("", "CA certificates; empty: the system's")
    insecure: t.Flag = option(False, "do not check the server's certificate; for tests only: each start warns of it")


class EncryptionSettings(Section):
    """Encryption at rest, by the store."""

    mode: Literal["none", "sse-s3", "sse-kms"] = option("none", "encryption by the store")
    kms_key_id: t.Label = option("", "the key; with `sse-kms`, empty: the bucket's default")


class StoreSettings(Section):
    """The object store that holds the segments."""

    url: Annotated[t.Text, AfterValidator(t.check_store_url), t.TypeName("URL")] = needed(
        "`s3://bucket` or `file:///folder`"
    )
    prefix: Annotated[
        t.Text, t.matching(_PREFIX, "parts of A-Z a-z 0-9 . _ = - joined by /, none beginning with . or _")
    ] = option("data", "the prefix of every key; empty: none")
    endpoint_url: Annotated[t.Text, _ENDPOINT, t.TypeName("URL")] = option(
        "", "a server that is not Amazon's: MinIO, SeaweedFS, Ceph"
    )
    region: Annotated[t.Text, t.matching(_REGION, "a region such as us-east-1"), t.Required] = option(
        "us-east-1", "the region that requests are signed for"
    )
    addressing_style: Literal["auto", "path", "virtual"] = option(
        "auto", "the place of the bucket in requests; auto: path with an `endpoint_url`"
    )
    checksum: Literal["sha256", "none"] = option(
        "sha256", "the checksum by which the server checks uploads; none: every object is read back whole"
    )
    access_key_id: t.Label = option("", "empty: the AWS credential chain")
    secret_access_key: t.Secret = option("", "the secret of `access_key_id`")
    tls: StoreTlsSettings = option({}, "TLS to the store")
    storage_class: StorageClass = option("", "empty: the bucket's default")
    encryption: EncryptionSettings = option({}, "encryption at rest")
    allow_plaintext: t.Flag = option(
        False, "send payloads without TLS to a store on another host; anyone on the network path can read them"
    )
    conditional_puts: Literal["auto", "yes", "no"] = option(
        "auto", "send conditions with puts; auto: until the store refuses one; no: also for a store that ignores them"
    )
    subject_statistics: t.Flag = option(
        True, "false: metadata of segments has no least and greatest subject, which are easy to read there"
    )

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from self.require_together("access_key_id", "secret_access_key")
        yield from _cold_problems(self.storage_class)
        if self.encryption.kms_key_id and self.encryption.mode != "sse-kms":
            yield "encryption.kms_key_id", f"expected mode sse-kms with it, found {self.encryption.mode}"
        if self.endpoint_url and self.url.startswith("file:"):
            yield "endpoint_url", "expected none with a file:// store, found one"
        if self.endpoint_url.startswith("http:") and (self.tls.ca or self.tls.insecure):
            yield "tls", "expected none for an http:// endpoint, found some"
        if t.is_plaintext(self.endpoint_url) and not self.allow_plaintext:
            what = "expected https:// for a store on another host, found http://, which sends payloads in clear"
            yield "endpoint_url", f"{what}; or set allow_plaintext: true on a trusted network"


MIN_LEVEL_AGE_S = 60.0  # seconds; neighbours of younger segments may still be on their way
LONG_READ_S = 6 * 3600.0  # seconds; a replay of a large archive takes hours

_LEVEL_KEYS = ("from", "to", "min_age", "max_wait", "min_count", "max_count", "min_size", "max_size")
_DEFAULT_LEVELS = (
    dict(zip(_LEVEL_KEYS, (0, 1, "1h", "1d", 10, 10000, "1G", "4G"), strict=True)),
    dict(zip(_LEVEL_KEYS, (1, 2, "7d", "30d", 4, 10000, "8G", "16G"), strict=True)),
)


class SparkSettings(Section):
    """The Spark session of the job."""

    master: Annotated[t.Label, t.Required] = option("local[*]", "Spark's master URL")
    conf: dict[t.Text, t.Text] = option({}, "further Spark settings, as text")


class LevelSettings(Section):
    """The limits at which segments of one level are merged into one of a higher level. `from_` is the key `from`."""

    model_config = ConfigDict(populate_by_name=True)

    from_: Annotated[t.Whole, t.Range(0, 8)] = Field(alias="from", description="the level that is read")
    to: Annotated[t.Whole, t.Range(1, 9)] = needed("the level that is written")
    min_age: Annotated[t.Duration, t.Range("1s", None, "younger segments may still be arriving")] = option(
        "1h", "segments younger than this wait"
    )
    max_wait: t.Duration = option("1d", "a run of `min_count` is merged at any size once its oldest is older than this")
    min_count: Annotated[t.Whole, t.Range(2, 1_000_000)] = option(10, "fewest segments for a merge after `max_wait`")
    max_count: Annotated[t.Whole, t.Range(2, 1_000_000)] = option(10000, "most segments in one merge")
    min_size: Annotated[t.Size, t.Range("64K", "64G")] = option("1G", "stored bytes that justify a merge")
    max_size: Annotated[t.Size, t.Range("64K", "64G")] = option("4G", "most stored bytes in one merge")
    storage_class: StorageClass = option("", "of the segments that are written; empty: `store.storage_class`")

    @model_validator(mode="before")
    @classmethod
    def _not_by_name(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context == t.FROM_FILE and isinstance(data, Mapping) and "from_" in data:
            raise t.value_error("the key from")
        return data

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        if self.to <= self.from_:
            yield "to", f"expected more than from, which is {self.from_}, found {self.to}"
        for low, high in (("min_age", "max_wait"), ("min_count", "max_count"), ("min_size", "max_size")):
            if getattr(self, low) > getattr(self, high):
                yield high, f"expected at least {low}, found less"
        yield from _cold_problems(self.storage_class)


RETENTION_RANGE = t.Range("1d", or_zero=True)


class FeedRetentionSettings(Section):
    """The retention of one feed, in place of the limits that `retention` sets for all."""

    site: t.SiteName = option("", "the site; empty: the feed at every site without an entry of its own")
    feed: Annotated[t.StreamName, t.Required] = needed("the feed")
    max_age: Annotated[t.Duration, RETENTION_RANGE] = option("0s", "0s: no limit")
    max_bytes: Annotated[t.Size, t.Range("1M", or_zero=True)] = option(0, "0: no limit")
    keep_from: t.Time = option("", "as above, for this feed; the earlier of the two applies")


class RetentionSettings(Section):
    """The limits at which segments are deleted for good, feed by feed."""

    max_age: Annotated[t.Duration, RETENTION_RANGE] = option(
        "0s", "segments are deleted whose newest message, or object, is older; 0s: no limit"
    )
    max_bytes: Annotated[t.Size, t.Range("1M", or_zero=True)] = option(
        0, "stored bytes of a feed of a site; the oldest segments beyond it are deleted; 0: no limit"
    )
    keep_from: t.Time = option("", "messages from this time on are never deleted, regardless of the other keys")
    feeds: tuple[FeedRetentionSettings, ...] = option((), "feeds with limits of their own; 0 there: no limit")

    @property
    def is_set(self) -> bool:
        return bool(self.max_age or self.max_bytes or self.feeds)

    def limits_of(self, site: str, feed: str) -> tuple[float, int, int | None]:
        """Return the age (seconds) and the stored bytes above which the feed is deleted, 0 for no limit, and the time
        (ns since 1970 UTC) from which nothing is deleted; None: no such time.
        """
        entries = {each.site: each for each in self.feeds if each.feed == feed}
        own = entries.get(site) or entries.get("")
        held = [parse_time(each) for each in (self.keep_from, own.keep_from if own else "") if each]
        age, size = (self.max_age, self.max_bytes) if own is None else (own.max_age, own.max_bytes)
        return age, size, min(held, default=None)

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        for first, index in find_repeated((each.site, each.feed) for each in self.feeds):
            which = "/".join(filter(None, (self.feeds[index].site, self.feeds[index].feed)))
            yield (f"feeds.{index}", f"expected one entry per feed, found {which} in feeds.{first} and feeds.{index}")


class CompactionSettings(Section):
    """The merging of segments."""

    engine: Literal["spark", "local"] = option("spark", "Spark, or this process without Java")
    spark: SparkSettings = option({}, "the Spark session")
    levels: tuple[LevelSettings, ...] = option(_DEFAULT_LEVELS, "the merges from level to level")
    delete: t.Flag = option(True, "delete inputs that were merged")
    delete_grace: t.Duration = option("24h", "how long merged inputs stay, for readers with an older listing")
    prove_deletions: t.Flag = option(
        True, "read the sequences of deleted and of remaining segments again in the run that deletes"
    )
    allow_short_times: t.Flag = option(
        False, "allow `delete_grace: 0s` and a `min_age` below 1m: for tests without other readers of the store"
    )
    retention: RetentionSettings = option({}, "when segments are deleted for good")

    def warnings(self) -> Iterator[tuple[str, str]]:
        if self.delete and self.delete_grace < LONG_READ_S and not self.allow_short_times:
            reason = (
                f"{t.format_duration(self.delete_grace)} is shorter than a long replay or query may take: "
                "readers with an older listing find segments deleted; Floe lists again, a Spark or DuckDB "
                f"query fails; expected at least {t.format_duration(LONG_READ_S)}"
            )
            yield "delete_grace", reason

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        override = "or set allow_short_times: true if there are no other readers of the store"
        if self.delete and not self.delete_grace and not self.allow_short_times:
            reason = "expected a time within which readers with an older listing end, such as 24h, found 0s"
            yield "delete_grace", f"{reason}; {override}"
        for index, level in enumerate(self.levels):
            if level.min_age < MIN_LEVEL_AGE_S and not self.allow_short_times:
                found = t.format_duration(level.min_age)
                yield f"levels.{index}.min_age", f"expected at least 1m, found {found}; {override}"
        for first, index in find_repeated(level.from_ for level in self.levels):
            found = f"{self.levels[index].from_} in levels.{first} and levels.{index}"
            yield f"levels.{index}.from", f"expected each level read once, found {found}"
        for first, index in find_repeated(level.to for level in self.levels):
            mine, other = self.levels[index].storage_class, self.levels[first].storage_class
            if mine != other:
                reason = f"expected {other!r}, as levels.{first} which writes the same level, found {mine!r}"
                yield f"levels.{index}.storage_class", reason


Role = Literal["egress", "ingress"]


class LogSettings(Section):
    """The log, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = option("info", "the lowest level that is logged")
    format: Literal["auto", "json", "text"] = option("auto", "auto: text on a terminal, JSON elsewhere")


class Settings(Section):
    """One document of a configuration file. A site has one, the centre has one, a test has both in one.

    `egress.nats` and `ingress.nats` are whole connections: `nats` with the overrides of the role.
    """

    instance: t.Label = option("", "a label for logs; empty: the host's name")
    site: t.SiteName = option("", "this site; needed with `egress.feeds`")
    spool_dir: t.Path = option(
        "", "the folder in which segments are built; empty: the system's; no file in it is needed to resume"
    )
    nats: NatsSettings = option({}, "the connection to NATS; `egress.nats` and `ingress.nats` override it key by key")
    store: StoreSettings = needed("the object store")
    log: LogSettings = option({}, "the log")
    egress: EgressSettings = option({}, "the archiving at this site")
    ingress: IngressSettings = option({}, "the targets at the centre")
    compaction: CompactionSettings = option({}, "how segments are merged")

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        roles = {role: _with_nats(given.get("nats", {}), given.get(role, {})) for role in ("egress", "ingress")}
        return {**given, **roles}

    def service_of(self, role: Role) -> ServiceSettings:
        return self.egress if role == "egress" else self.ingress

    def nats_for(self, role: Role) -> NatsSettings:
        return self.service_of(role).nats

    def with_nats_context(self, name: str) -> Self:
        """Return the settings, connected by the context `name` of the `nats` command; unchanged if `name` is empty."""
        if not name:
            return self
        parts = {part: getattr(self, part) for part in ("egress", "ingress")}
        roles = {part: each.model_copy(update={"nats": each.nats.from_context(name)}) for part, each in parts.items()}
        return self.model_copy(update={"nats": self.nats.from_context(name), **roles})

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        if self.egress.feeds_ and not self.site:
            yield "site", "expected a name if egress has feeds, found none"
        if self.ingress.events and self.store.url.startswith("file:"):
            yield "ingress.events", "expected none with a file:// store, found some"
        for index, level in enumerate(self.compaction.levels):
            if level.storage_class and self.store.url.startswith("file:"):
                reason = f"expected none with a file:// store, found {level.storage_class}"
                yield f"compaction.levels.{index}.storage_class", reason

    def loop_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem for each target that is also the stream of a feed that flows into it: it would grow for ever.

        Problems have the form of `combination_problems`. The check is separate because the file with every default has
        one stream on both sides.
        """
        ours, theirs = self.egress.nats, self.ingress.nats
        if ours.context != theirs.context or ours.api_prefix != theirs.api_prefix:
            return
        if set(ours.url).isdisjoint(theirs.url):
            return
        for index, target in enumerate(self.ingress.targets):
            names = {target.stream, *(each.name for each in self.egress.feeds)}
            feeds = filter(None, map(self.egress.feed_named, names))
            # A pattern takes a target only as a relay.
            own = [each.name for each in feeds if each.stream == target.stream and (each.relay or not each.streams)]
            for number, source in enumerate(target.sources):
                if any(source.matches(self.site, name) for name in own):
                    key = f"ingress.targets.{index}.sources.{number}"
                    reason = f"expected a stream other than the target, found {target.stream} archived by egress"
                    yield key, reason


def _with_nats(nats: Any, role: Any) -> Any:
    role = to_plain(role)
    return {**role, "nats": merge(nats, role.get("nats", {}))} if isinstance(role, Mapping) else role


def sections_of(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def fields_of(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def section_at(path: Sequence[str | int]) -> type[Section] | None:
    """Return the section at `path`, or None if there is no such section."""
    section: type[Section] | None = Settings
    for part in path:
        if isinstance(part, str) and section is not None:
            field = fields_of(section).get(part)
            section = next(iter(sections_of(field.annotation)), None) if field else None
    return section


def is_secret(section: type[Section] | None, key: str) -> bool:
    field = fields_of(section).get(key) if section else None
    return field is not None and field.annotation is SecretStr
