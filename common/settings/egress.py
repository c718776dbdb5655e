"""Settings of egress: the streams to archive, and the options of each."""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag

from common.chain import FEED_PATTERN, MAX_PARTITIONS_PER_FEED
from common.settings import types as t
from common.settings.service import MonitorTlsSettings, ServiceSettings, StartSettings
from common.settings.types import Section, find_repeated, merge_entries, needed, option
from common.subjects import any_name_matches, common_name, first_overlap

_NAME = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]{1,255}")  # a token of RFC 9110; a colon would end it
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]{0,4096}")


class HeartbeatSubjectSettings(Section):
    """One subject to publish heartbeats on."""

    subject: Annotated[t.Subject, t.Required] = needed("the subject")
    interval: Annotated[t.Duration, t.Range("1s", "1d", or_zero=True)] = option("0s", "0s: that of `heartbeats`")


class HeartbeatSettings(Section):
    """Heartbeats: messages that keep a quiet stream moving."""

    interval: Annotated[t.Duration, t.Range("1s", "1d")] = option("10s", "between two of them")
    headers: dict[t.Text, t.Text] = option({}, "headers of each")
    subjects: tuple[HeartbeatSubjectSettings, ...] = option((), "their subjects; none: no heartbeats")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        for name, value in self.headers.items():
            if not _NAME.fullmatch(name):
                yield "headers", f"expected a name of letters, digits and - _ ., found {name!r:.80}"
            elif name.lower().startswith(("nats-", "floe-")):
                yield "headers", f"expected no header that NATS or Floe acts on, found {name}"
            elif not _VALUE.fullmatch(value):
                found = f"found {value!r:.80}"
                yield "headers", f"expected a value of {name} on one line, at most 4096 characters, {found}"
        for _, index in find_repeated(each.subject for each in self.subjects):
            again = self.subjects[index].subject
            yield f"subjects.{index}.subject", f"expected each subject once, found {again} again"


class EgressMonitorSettings(Section):
    """The monitor of egress."""

    listen: t.Listen = option("127.0.0.1:9464", "address and port of /metrics /healthz /readyz /status; empty: off")
    tls: MonitorTlsSettings = option({}, "TLS of the pages")


class SegmentSettings(Section):
    """The limits at which a segment is closed; the first one reached applies."""

    max_messages: Annotated[t.Whole, t.Range(1, 100_000_000)] = option(1000000, "messages in one segment")
    max_size: Annotated[t.Size, t.Range("64K", "4G", "smaller segments are not worth their requests")] = option(
        "100M", "bytes of subjects, headers and payloads in one segment, before compression"
    )
    max_age: Annotated[t.Duration, t.Range("1s", "1d", "each segment is an object, and a request at every reader")] = (
        option("5m", "how long a message waits at most before its segment is stored")
    )
    compression_level: Annotated[t.Whole, t.Range(1, 22)] = option(1, "of zstd")


CAPTURE_DELETES_S = 600.0  # seconds, for streams in which a deletion leaves no message
PARTITION_PLACEHOLDER = "{partition}"  # placeholder for the number in a template


class PartitionSettings(Section):
    """Filtered slices of a feed, numbered from 0."""

    count: Annotated[t.Whole, t.Range(1, MAX_PARTITIONS_PER_FEED, "each has its own worker, consumer and lease")] = (
        option(1, "how many")
    )
    subject: t.Text = option("", "the filter of each, with `{partition}` in it; needed if count is over 1")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        expected = ""
        if self.count > 1 and PARTITION_PLACEHOLDER not in self.subject:
            expected = f"{{partition}} in it if count is {self.count}"
        elif self.subject and not t.is_filter(self.filters()[0]):
            expected = "a subject, * and a last > allowed, without empty tokens"
        if expected:
            yield "subject", f"expected {expected}, found {self.subject!r}"

    def filters(self) -> tuple[str, ...]:
        """Return the filter of each, by its number. No two overlap: they differ in a token that is not a wildcard."""
        return tuple(self.subject.replace(PARTITION_PLACEHOLDER, str(number)) for number in range(self.count))


class AdvisorySettings(Section):
    """Documents that report when each value of the sampling key was seen."""

    subject: t.AdvisorySubject = option("", "their subject; `%s`: the event, `%v`: the value; empty: none")
    reliable: t.Flag = option(False, "retry until they are stored")


Partitions = Annotated[
    Annotated[PartitionSettings, Tag("(mapping)")] | Annotated[tuple[t.SubjectFilter, ...], Tag("(list)")],
    Discriminator(lambda value: "(list)" if isinstance(value, list | tuple) else "(mapping)"),
]


MQTT_PREFIX = "$MQTT_"  # of the names of the streams that a server keeps for MQTT
Patterns = Annotated[tuple[Annotated[t.StreamPattern, t.Required], ...], t.OneOrMore]


class FeedSettings(StartSettings):
    """One named way of archiving a stream, or with `streams` each stream of the account that a pattern matches.

    `name` is never empty for a stream: by default it is the stream's name.
    """

    name: t.StreamName = option("", "the feed's name in the store; default: the stream")
    stream: t.StreamName = option("", "the stream; needed without `streams`")
    streams: Patterns = option(
        (), "in place of `stream`: each stream with such a name, `*` for any text, is a feed named as it is"
    )
    except_: Patterns = Field((), alias="except", description="with `streams`: names that it does not match")
    retention: tuple[Literal["limits", "interest", "workqueue"], ...] = option(
        ("limits",), "with `streams`: only of these; archived messages of the other two are acknowledged, so removed"
    )
    mirrors: t.Flag = option(False, "with `streams`: mirrors too")
    filter_subject: t.SubjectFilter = option("", "archive only these subjects; excludes `partitions`")
    partitions: Partitions = option({}, "slices that are archived in parallel: a mapping, or a list of filters")
    max_age: Annotated[t.Duration, t.Range("1s", or_zero=True)] = option(
        "0s", "leave out messages older than this, counted from the newest one seen; 0s: off"
    )
    relay: t.Flag = option(False, "the stream is itself a target of Floe")
    on_recreated: Literal["continue", "halt"] = option(
        "continue", "if the stream is recreated: begin its next incarnation, or wait for an operator"
    )
    inspect_field: t.Label = option("", "sample by this field of JSON payloads")
    inspect_header: t.Label = option("", "sample by this header")
    inspect_subject_token: Annotated[t.Whole, t.Range(-1, 255)] = option(
        0, "sample by this token of the subject, from 1; -1: the whole subject; 0: off"
    )
    inspect_force_field: t.Label = option("", "a field that, when true, lets a message pass")
    inspect_duration: Annotated[t.Duration, t.Range("1s", or_zero=True)] = option(
        "0s", "pass one message for each value in this time, less at most a tenth and a second; needed with sampling"
    )
    warn_duration: Annotated[t.Duration, t.Range("1s", or_zero=True)] = option(
        "0s", "report a value that was not seen for this long; 0s: half of `inspect_duration`"
    )
    size_trigger: t.Size = option("0", "pass a payload if its size changes by this many bytes; 0: off")
    snapshot_interval: Annotated[t.Duration, t.Range("1s", "1d")] = option("1m", "between snapshots of the sampler")
    advisory: AdvisorySettings = option({}, "documents about new, silent and returning values; with sampling")
    segment: SegmentSettings = option({}, "when a segment is closed")
    capture_consumers: Annotated[t.Period, t.Required] = option(
        "1m", "how often changed consumers are captured, for a restore; positions alone at most every 5m; or `never`"
    )
    capture_deletes: t.Period = option(
        "",
        "how often deleted messages are captured, for a restore; empty: 10m for object stores (`OBJ_…`) and work "
        "queues, else when the stream's configuration changes; `never`: not at all",
    )

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        stream = given.get("stream")
        # An invalid stream name is reported once, as `stream`.
        is_free = given.get("name", "") == "" and not given.get("streams")
        if is_free and isinstance(stream, str) and FEED_PATTERN.fullmatch(stream):
            return {**given, "name": stream}
        return given

    def filters(self) -> tuple[str, ...]:
        """Return the filter subject of each partition, by its number; empty: all subjects. There is at least one."""
        if isinstance(self.partitions, tuple):
            return self.partitions
        return self.partitions.filters() if self.partitions.subject else (self.filter_subject,)

    @property
    def capture_consumers_s(self) -> float:
        """Seconds between two captures of the consumers; 0: never."""
        return t.parse_period(self.capture_consumers)

    def capture_deletes_s(self, retention: str) -> float:
        """Return seconds between two captures of deleted sequences; 0: never. `retention`: of the stream."""
        if self.capture_deletes:
            return t.parse_period(self.capture_deletes)
        return CAPTURE_DELETES_S if self.stream.startswith("OBJ_") or retention == "workqueue" else 0.0

    @property
    def is_pattern(self) -> bool:
        """True if it stands for the streams that it matches, and archives none by itself."""
        return bool(self.streams and not self.stream)

    @property
    def label(self) -> str:
        """The name, or the patterns."""
        return self.name or self.pattern

    @property
    def pattern(self) -> str:
        return ", ".join(self.streams)

    def matches(self, stream: str) -> bool:
        """True if the pattern takes a stream of that name. Streams of MQTT need a pattern that begins with `$MQTT_`."""
        names = [each for each in self.streams if each.startswith(MQTT_PREFIX) or not stream.startswith(MQTT_PREFIX)]
        return any_name_matches(names, stream) and not any_name_matches(self.except_, stream)

    def for_stream(self, stream: str) -> Self:
        """Return the feed of a stream that the pattern matches."""
        return self.model_copy(update={"name": stream, "stream": stream})

    @property
    def is_partitioned(self) -> bool:
        return self.partitions != PartitionSettings()

    @property
    def sampling_key(self) -> str:
        """The setting that names the sampling key, such as `inspect_field`; empty if the feed is not sampled."""
        return next(iter(self._sampling_keys()), "")

    def _sampling_keys(self) -> list[str]:
        return self.keys_set("inspect_field", "inspect_header", "inspect_subject_token")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().combination_problems()
        if self.streams:
            excluded = self.keys_set("name", "stream", "filter_subject") + ["partitions"] * self.is_partitioned
            yield from ((key, "expected none with streams, found one") for key in excluded)
            if not self.retention:
                yield "retention", "expected at least one entry, found an empty list"
        else:
            if not self.stream and "streams" in self.model_fields_set:
                yield "streams", "expected at least one pattern, found an empty list"
            elif not self.stream:
                yield "stream", "expected a value (required), found nothing"
            unused = ["except"] * bool(self.except_) + ["retention"] * (self.retention != ("limits",))
            unused += self.keys_set("mirrors")
            yield from ((key, "expected streams with it, found none") for key in unused)
        if self.filter_subject and self.is_partitioned:
            yield "filter_subject", "expected either filter_subject or partitions, found both"
        if isinstance(self.partitions, tuple):
            yield from _filter_problems(self.partitions)
        found = self._sampling_keys()
        if len(found) > 1:
            yield found[1], f"expected at most one key to sample by, found {' and '.join(found)}"
        if not found:
            reason = "expected inspect_field, inspect_header or inspect_subject_token with it, found none"
            unused = self.keys_set("inspect_force_field", "inspect_duration", "warn_duration", "size_trigger")
            yield from ((name, reason) for name in (*unused, *(["advisory"] if self.advisory.subject else [])))
        elif not self.inspect_duration:
            yield found[0], "expected inspect_duration with it, found none"
        elif self.warn_duration >= self.inspect_duration:
            yield "warn_duration", "expected less than inspect_duration, found as much or more"


def _filter_problems(filters: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not filters or not all(filters):
        yield "partitions", f"expected filters, none of them empty, found {list(filters)}"
    elif len(filters) > MAX_PARTITIONS_PER_FEED:
        yield "partitions", f"expected at most {MAX_PARTITIONS_PER_FEED} filters, found {len(filters)}"
    elif again := next(find_repeated(filters), None):
        yield "partitions", f"expected each filter once, found {filters[again[0]]!r} again"
    elif pair := first_overlap(filters):
        yield "partitions", f"expected filters that do not overlap, found {pair[0]!r} and {pair[1]!r}"


class EgressSettings(ServiceSettings):
    """The feeds that a site archives. `feeds_`: all entries of `feeds`, patterns included."""

    monitor: EgressMonitorSettings = option({}, "the monitor")
    workers: Annotated[t.Whole, t.Range(1, 64)] = option(1, "processes, under one monitor")
    defaults: dict[str, Any] = option({}, "keys that entries of `feeds` may override")
    feeds_: tuple[FeedSettings, ...] = Field((), alias="feeds", description="the feeds to archive")
    not_archived: Patterns = option(
        (), "streams that need no archive, `*` for any text: no pattern takes them, and they are not named as uncovered"
    )
    heartbeats: HeartbeatSettings = option({}, "periodic messages for quiet streams")

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        return merge_entries(given, "feeds", given.get("defaults"))

    @property
    def feeds(self) -> tuple[FeedSettings, ...]:
        """The feeds of streams that the configuration names."""
        return tuple(each for each in self.feeds_ if not each.is_pattern)

    @property
    def patterns(self) -> tuple[FeedSettings, ...]:
        return tuple(each for each in self.feeds_ if each.is_pattern)

    def feeds_of(self, stream: str) -> tuple[FeedSettings, ...]:
        """Return the feeds of a stream: those that name it, else that of the pattern that matches it, if any.

        The name alone decides; a pattern may leave the stream out for its retention, or because it is a copy.
        """
        own = tuple(each for each in self.feeds if each.stream == stream)
        if own or self.needs_no_archive(stream) or any(each.name == stream for each in self.feeds):
            return own
        return tuple(each.for_stream(stream) for each in self.patterns if each.matches(stream))

    def feed_named(self, name: str) -> FeedSettings | None:
        """Return the feed of that name, also of a stream that a pattern matches; None if there is none."""
        return next((each for each in (*self.feeds, *self.feeds_of(name)) if each.name == name), None)

    def needs_no_archive(self, stream: str) -> bool:
        return any_name_matches(self.not_archived, stream)

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().combination_problems()
        named = [(index, each.name) for index, each in enumerate(self.feeds_) if each.name]
        for first, index in find_repeated(name for _, name in named):
            found = f"{named[index][1]!r} in feeds.{named[first][0]} and feeds.{named[index][0]}"
            yield f"feeds.{named[index][0]}.name", f"expected a unique name, found {found}"
        streams = [each for feed in self.feeds for each in {feed.stream, feed.name}]
        for (first, one), (index, other) in combinations(enumerate(self.feeds_), 2):
            excluded = (*one.except_, *other.except_, *self.not_archived, *streams)
            for both in product(one.streams, other.streams):
                if (name := common_name(both, excluded)) is not None:
                    found = f"{both[0]!r} of feeds.{first} and {both[1]!r} of feeds.{index}, as for {name!r}"
                    yield f"feeds.{index}.streams", f"expected at most one entry that matches a stream, found {found}"
                    break
