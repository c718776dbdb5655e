"""Settings of egress: the streams to archive, and the options of each."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from common.chain import FEED_PATTERN, MAX_PARTITIONS_PER_FEED
from common.settings import types as t
from common.settings.service import MonitorTlsSettings, ServiceSettings, StartSettings
from common.settings.types import Section, find_repeated, merge_entries, needed, option
from common.subjects import first_overlap

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


class FeedSettings(StartSettings):
    """One named way of archiving a stream. `name` is never empty: by default it is the stream's name."""

    name: t.StreamName = option("", "the feed's name in the store; default: the stream")
    stream: Annotated[t.StreamName, t.Required] = needed("the stream")
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
        "0s", "pass one message for each value in this time; needed with sampling"
    )
    warn_duration: Annotated[t.Duration, t.Range("1s", or_zero=True)] = option(
        "0s", "report a value that was not seen for this long; 0s: half of `inspect_duration`"
    )
    size_trigger: t.Size = option("0", "pass a payload if its size changes by this many bytes; 0: off")
    snapshot_interval: Annotated[t.Duration, t.Range("1s", "1d")] = option("1m", "between snapshots of the sampler")
    advisory: AdvisorySettings = option({}, "documents about new, silent and returning values; with sampling")
    segment: SegmentSettings = option({}, "when a segment is closed")
    capture_consumers: Annotated[t.Period, t.Required] = option(
        "1m", "how often the stream's consumers are captured, for a restore of it; `never`: not at all"
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
        if isinstance(stream, str) and FEED_PATTERN.fullmatch(stream) and given.get("name", "") == "":
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
    """The feeds that a site archives."""

    monitor: EgressMonitorSettings = option({}, "the monitor")
    workers: Annotated[t.Whole, t.Range(1, 64)] = option(1, "processes, under one monitor")
    defaults: dict[str, Any] = option({}, "keys that entries of `feeds` may override")
    feeds: tuple[FeedSettings, ...] = option((), "the feeds to archive")
    not_archived: Annotated[tuple[Annotated[t.StreamPattern, t.Required], ...], t.OneOrMore] = option(
        (), "streams of the account that need no archive, `*` for any text: not named as uncovered"
    )
    heartbeats: HeartbeatSettings = option({}, "periodic messages for quiet streams")

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Any:
        return merge_entries(given, "feeds", given.get("defaults"))

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().combination_problems()
        for first, index in find_repeated(feed.name for feed in self.feeds):
            found = f"{self.feeds[index].name!r} in feeds.{first} and feeds.{index}"
            yield f"feeds.{index}.name", f"expected a unique name, found {found}"
