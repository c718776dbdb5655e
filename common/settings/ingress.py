"""Settings of ingress: the chains that flow into each target stream."""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from common.settings import types as t
from common.settings.service import MonitorTlsSettings, ServiceSettings, StartSettings
from common.settings.types import Section, find_repeated, merge_entries, needed, option
from common.subjects import TransformError, any_name_matches, compile_transform, covers

_PREFIX = re.compile(r"[^\s.*>\x00-\x1f\x7f][^\s*>\x00-\x1f\x7f]*")
_CHAIN_FIELD = re.compile(r"\{(site|feed|incarnation|partition)\}")
_SUBJECT_PART = re.compile(r"[^\s*>\x00-\x1f\x7f]+")
# A subject, or a queue by its name or its whole address.
_EVENTS_SOURCE = re.compile(
    r"nats://[^\s.@:/>\x00-\x1f\x7f]+(\.[^\s.@:/>\x00-\x1f\x7f]+)*(\.>)?"
    r"|sqs://([A-Za-z0-9.:-]+/([0-9]{12}/)?)?[A-Za-z0-9_-]{1,80}"
)
_POLL_WITH_EVENTS_S = 60.0  # seconds

# They control how a message is stored, so a copied one would break the promises of the publishers.
_FORBIDDEN_CONTROL_HEADERS = ("nats-expected-", "nats-batch-", "nats-msg-id", "nats-required-api-level")


def _check_control_header(name: str) -> str:
    if not re.fullmatch(r"Nats-[A-Za-z0-9-]+", name, re.IGNORECASE):
        raise t.value_error("a header of NATS such as Nats-TTL")
    if name.lower().startswith(_FORBIDDEN_CONTROL_HEADERS):
        raise t.value_error("a header that ingress does not set itself, such as Nats-TTL")
    return name


def _check_fields(prefix: str) -> str:
    if re.search(r"[{}]", _CHAIN_FIELD.sub("", prefix)):
        raise t.value_error("only {site}, {feed}, {incarnation} and {partition} in braces")
    return prefix


class IngressMonitorSettings(Section):
    """The monitor of ingress."""

    listen: t.Listen = option("127.0.0.1:9465", "address and port of /metrics /healthz /readyz /status; empty: off")
    tls: MonitorTlsSettings = option({}, "TLS of the pages")
    per_chain: t.FlagOrMoving = option(
        True, "series of each chain in /metrics; moving: only of chains that are behind or stopped; false: of targets"
    )


class CreateSettings(Section):
    """The configuration with which a missing target stream is created."""

    replicas: Annotated[t.Whole, t.Range(1, 5)] = option(1, "copies in the cluster")
    storage: Literal["file", "memory"] = option("file", "the storage of the stream")
    max_age: Annotated[t.Duration, t.Range("1s", or_zero=True)] = option(
        "0s", "messages are kept this long; 0s: for ever"
    )
    max_bytes: t.Size = option(0, "bytes that are kept; 0: no limit")
    subjects: tuple[Annotated[t.SubjectFilter, t.Required], ...] = option(
        (), "the subjects of the stream; none: all below the `subject_prefix` of each source"
    )


class SubjectTransformSettings(Section):
    """A subject transform in the notation of NATS."""

    source: t.SubjectFilter = option("", "subjects it applies to; with `destination`")
    destination: t.Text = option("", "the subjects they become; with `source`")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from self.require_together("source", "destination")
        if self.source and self.destination:
            try:
                compile_transform(self.source, self.destination)
            except TransformError as error:
                yield error.side, error.reason


class SourceSettings(StartSettings):
    """Chains that may flow into a target: those of any of `site` with any of `feed`. `*` in either stands for any text:
    the feeds of the store that match are taken at first sight.
    """

    site: Annotated[tuple[Annotated[t.SitePattern, t.Required], ...], t.OneOrMore, t.Required] = needed(
        "the site, or a list; `*` for any text"
    )
    feed: Annotated[tuple[Annotated[t.StreamPattern, t.Required], ...], t.OneOrMore, t.Required] = needed(
        "the feed, or a list; `*` for any text"
    )
    max_sites: Annotated[t.Whole, t.Range(1)] = option(
        10000, "with `*`: feeds of further sites are named, and not delivered"
    )
    subject_prefix: Annotated[
        t.Text, t.matching(_PREFIX, "the first tokens of a subject, without wildcards"), AfterValidator(_check_fields)
    ] = option(
        "",
        "put before each subject, with a dot; `{site}`, `{feed}`, `{incarnation}`, `{partition}`: those of the chain",
    )
    subject_remove: Annotated[t.Text, t.matching(_SUBJECT_PART, "a part of a subject, without wildcards")] = option(
        "", "removed from each subject after the prefix is added; then `..` becomes `.`"
    )
    subject_transform: SubjectTransformSettings = option({}, "excludes the two above")
    lost_segment_timeout: Annotated[t.Duration, t.Range("1s")] = option(
        "24h", "a hole is late until the first segment after it is this old, then lost"
    )
    on_lost: Literal["halt", "skip"] = option("halt", "if a segment is lost: wait for an operator, or skip it")
    control_headers: tuple[Annotated[t.Text, AfterValidator(_check_control_header), t.TypeName("header")], ...] = (
        option((), "headers of the source's publishers, such as Nats-TTL, that also act at the target")
    )
    max_chains: Annotated[t.Whole, t.Range(1)] = option(
        4096,
        "a feed of a site stops if it has more chains than this that are not delivered to their end; with `*`, a site "
        "has at most so many feeds",
    )

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().combination_problems()
        if self.subject_transform.source and (self.subject_prefix or self.subject_remove):
            yield "subject_transform", "expected it without subject_prefix and subject_remove, found both"
        for name in ("site", "feed"):
            values = getattr(self, name)
            for _, index in find_repeated(values):
                yield f"{name}.{index}", f"expected each {name} once, found {values[index]!r} twice"

    def prefix_of(self, site: str, feed: str, incarnation: int | str, partition: int | str) -> str:
        """Return `subject_prefix` with the fields of one chain filled in. No field contains a dot."""
        fields = {"site": site, "feed": feed, "incarnation": incarnation, "partition": partition}
        return _CHAIN_FIELD.sub(lambda found: str(fields[found[1]]), self.subject_prefix)

    def prefix_patterns(self) -> tuple[str, ...]:
        """Return the prefixes of all its chains, with `*` for a token that contains an incarnation, a partition or a
        pattern.
        """
        found = (self.prefix_of(site, feed, "*", "*") for site, feed in product(self.site, self.feed))
        return tuple(dict.fromkeys(".".join("*" if "*" in each else each for each in p.split(".")) for p in found))

    @property
    def acting_headers(self) -> frozenset[bytes]:
        """The names of headers that take effect at the target, in lower case."""
        return frozenset(name.lower().encode() for name in self.control_headers)

    def site_feed_pairs(self) -> list[tuple[str, str]]:
        """Return the feeds that it names, without patterns."""
        return [pair for pair in product(self.site, self.feed) if "*" not in "".join(pair)]

    @property
    def is_pattern(self) -> bool:
        return any("*" in name for name in (*self.site, *self.feed))

    def matches(self, site: str, feed: str) -> bool:
        """True if it names the feed, or if its patterns match it."""
        return any_name_matches(self.site, site) and any_name_matches(self.feed, feed)


class TargetSettings(Section):
    """A target stream and the sources that flow into it."""

    stream: Annotated[t.StreamName, t.Required] = needed("the target stream")
    create: CreateSettings | None = option(None, "create the stream if it does not exist; null: stop instead")
    exclusive: t.Flag = option(True, "nobody else publishes to it")
    delivery: Literal["exactly_once", "at_least_once"] = option("exactly_once", "exactly once needs `exclusive: true`")
    allow_async_persist: t.Flag = option(
        False, "accept a target with `persist_mode: async`, whose server loses acknowledged messages if it is killed"
    )
    publisher: Literal["auto", "fast", "atomic", "single"] = option(
        "auto", "how messages are published; auto: the best that server and stream support"
    )
    on_oversize: Literal["halt", "park"] = option(
        "halt", "if a message with its headers is too large for the target: wait for an operator, or park it"
    )
    on_new_incarnation: Literal["continue", "halt"] = option(
        "continue", "if a source's stream is recreated: continue with it, or wait for an operator"
    )
    sources: Annotated[tuple[SourceSettings, ...], t.Required] = needed("the chains that may flow into it")

    @property
    def feed_sources(self) -> dict[tuple[str, str], SourceSettings]:
        """The feeds that an entry names, each with that entry; they win over patterns."""
        return {pair: source for source in self.sources for pair in source.site_feed_pairs()}

    @property
    def source_names(self) -> frozenset[str]:
        """The feeds that may flow in, as `site/feed`, patterns included."""
        return frozenset("/".join(pair) for source in self.sources for pair in product(source.site, source.feed))

    @property
    def patterns(self) -> dict[int, SourceSettings]:
        """The entries with patterns, by their numbers."""
        return {number: source for number, source in enumerate(self.sources) if source.is_pattern}

    def matched_feeds(self, feeds: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
        """Return those of `feeds` that no entry names and that patterns match, each with the numbers of these entries:
        a feed with several is refused.
        """
        if not (patterns := self.patterns):  # `feeds` may be all of a centre
            return {}
        others = {*feeds} - self.feed_sources.keys()
        found = {feed: [n for n, each in patterns.items() if each.matches(*feed)] for feed in others}
        return {feed: numbers for feed, numbers in sorted(found.items()) if numbers}

    def listed_feeds(self, feeds: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return the feeds that an entry names, and those of `feeds` that patterns match."""
        return self.feed_sources.keys() | self.matched_feeds(feeds).keys()

    def source_of(self, site: str, feed: str) -> SourceSettings | None:
        """Return the entry by which the feed flows in; None without one, or if several patterns match."""
        pair = site, feed
        numbers = self.matched_feeds([pair]).get(pair, [])
        return self.feed_sources.get(pair) or (self.sources[numbers[0]] if len(numbers) == 1 else None)

    def subjects_to_create(self) -> tuple[str, ...]:
        """Return the subjects of the stream when it is created; empty without `create`."""
        if self.create is None:
            return ()
        given = (prefix for source in self.sources for prefix in source.prefix_patterns())
        prefixes = dict.fromkeys(prefix.rstrip(".") for prefix in given)
        made = [f"{prefix}.>" for prefix in prefixes if prefix]
        wide = [subject for subject in made if "*" in subject]  # they must not overlap others
        apart = (each for each in made if not any(covers(other, each) for other in wide if other != each))
        return self.create.subjects or tuple(apart)

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        if self.delivery == "exactly_once" and not self.exclusive:
            yield "delivery", "expected at_least_once if exclusive is false, found exactly_once"
        if self.create and not self.create.subjects and not all(s.subject_prefix for s in self.sources):
            yield "create", "expected subjects if a source has no subject_prefix, found none"
        pairs = [(pair, index) for index, source in enumerate(self.sources) for pair in source.site_feed_pairs()]
        for one, other in find_repeated(pair for pair, _ in pairs):
            (site, feed), index = pairs[other]
            if index != pairs[one][1]:
                where = f"sources.{pairs[one][1]} and sources.{index}"
                yield f"sources.{index}", f"expected each feed of a site once, found {site}/{feed} in {where}"


class IngressSettings(ServiceSettings):
    """The target streams, and the chains that flow into each."""

    monitor: IngressMonitorSettings = option({}, "the monitor")
    poll_interval: Annotated[t.Duration, t.Range("1s", "1h", "each poll lists the store")] = option(
        "10s", "between two listings for new segments; 60s if events are set"
    )
    events: Annotated[t.Text, t.matching(_EVENTS_SOURCE, "nats://SUBJECT or sqs://QUEUE")] = option(
        "", "notifications of the bucket, such as nats://minio.events or sqs://floe-events"
    )
    requests_per_second: Annotated[t.Whole, t.Range(1, 1000)] = option(
        5, "listings a second, at most, of chains of which nothing shows a change"
    )
    silent_after: Annotated[t.Duration, t.Range("1m", "7d", "heartbeats come every half minute")] = option(
        "5m", "a site without a heartbeat for this long is silent; a chain late for this long is reported"
    )
    defaults: dict[str, Any] = option({}, "keys that entries of `sources` may override")
    targets: tuple[TargetSettings, ...] = option((), "the target streams")

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        targets, defaults = given.get("targets"), given.get("defaults")
        if not isinstance(targets, list | tuple):
            return given
        return {**given, "targets": [merge_entries(target, "sources", defaults) for target in targets]}

    @property
    def poll_seconds(self) -> float:
        """Seconds between two polls: `poll_interval`; if that is not set and `events` is, 60."""
        is_set = "poll_interval" in self.model_fields_set
        return _POLL_WITH_EVENTS_S if self.events and not is_set else self.poll_interval

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().combination_problems()
        for first, index in find_repeated(target.stream for target in self.targets):
            found = f"{self.targets[index].stream!r} in targets.{first} and targets.{index}"
            yield f"targets.{index}.stream", f"expected each stream once, found {found}"
