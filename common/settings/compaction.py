"""Compaction: what is merged into what, and when inputs go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, model_validator

from common.settings.base import Section, needed, option
from common.settings.types import FROM_FILE, Duration, Flag, Label, Range, Required, Size, Text, Whole, refuse
from common.settings.units import format_duration

LEAST_AGE = 60.0  # seconds; what is younger may have neighbours that are still on their way
LONG_READER = 6 * 3600.0  # seconds; a replay of a large archive takes hours

_LEVELS = (
    {
        "from": 0,
        "to": 1,
        "min_age": "1h",
        "max_wait": "1d",
        "min_count": 10,
        "max_count": 10000,
        "min_size": "1G",
        "max_size": "4G",
    },
    {
        "from": 1,
        "to": 2,
        "min_age": "7d",
        "max_wait": "30d",
        "min_count": 4,
        "max_count": 10000,
        "min_size": "8G",
        "max_size": "16G",
    },
)


class SparkSettings(Section):
    """The Spark session of the job."""

    master: Annotated[Label, Required] = option("local[*]", "where it runs")
    conf: dict[Text, Text] = option({}, "further settings of Spark, as text")


class LevelSettings(Section):
    """When segments of one level are merged into one of a higher level. `from_` is the key `from`."""

    model_config = ConfigDict(populate_by_name=True)

    from_: Annotated[Whole, Range(0, 8)] = Field(alias="from", description="the level that is read")
    to: Annotated[Whole, Range(1, 9)] = needed("the level that is written")
    min_age: Annotated[Duration, Range("1s", None, "younger segments may still be on their way")] = option(
        "1h", "segments younger than this wait"
    )
    max_wait: Duration = option(
        "1d", "a run of `min_count` whose oldest is older than this is merged however small"
    )
    min_count: Annotated[Whole, Range(2, 1_000_000)] = option(
        10, "segments that are worth a merge after `max_wait`"
    )
    max_count: Annotated[Whole, Range(2, 1_000_000)] = option(10000, "segments of one merge at most")
    min_size: Annotated[Size, Range("64K", "64G")] = option("1G", "stored bytes that are worth a merge")
    max_size: Annotated[Size, Range("64K", "64G")] = option("4G", "stored bytes of one merge at most")

    @model_validator(mode="before")
    @classmethod
    def _not_by_name(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context == FROM_FILE and isinstance(data, Mapping) and "from_" in data:
            raise refuse("the key from")
        return data

    def combinations(self) -> Iterator[tuple[str, str]]:
        if self.to <= self.from_:
            yield "to", f"expected more than from, which is {self.from_}, found {self.to}"
        for low, high in (("min_age", "max_wait"), ("min_count", "max_count"), ("min_size", "max_size")):
            if getattr(self, low) > getattr(self, high):
                yield high, f"expected at least {low}, found less"


class RetentionSettings(Section):
    """When segments are deleted for good."""

    delete_after: Annotated[Duration, Range("1d", or_zero=True)] = option("0s", "0s: kept for ever")


class CompactionSettings(Section):
    """How segments are merged."""

    engine: Literal["spark", "local"] = option("spark", "Spark, or this process without Java")
    verify: Literal["spark", "merge"] = option(
        "spark", "who proves that no row was lost: a job of its own, or the merge's own read-back"
    )
    spark: SparkSettings = option({}, "the Spark session")
    levels: tuple[LevelSettings, ...] = option(_LEVELS, "which level becomes which")
    delete: Flag = option(True, "delete inputs that were merged")
    delete_grace: Duration = option(
        "24h", "how long merged inputs stay, for readers that hold an older listing"
    )
    allow_short_times: Flag = option(
        False,
        "take `delete_grace: 0s` and a `min_age` below 1m: for tests, where nobody else reads the store",
    )
    retention: RetentionSettings = option({}, "when segments are deleted for good")

    def cautions(self) -> Iterator[tuple[str, str]]:
        """Keys that are allowed as they are, and what can happen."""
        if self.delete and self.delete_grace < LONG_READER and not self.allow_short_times:
            yield (
                "delete_grace",
                f"{format_duration(self.delete_grace)} is shorter than a long replay or query may take: what "
                "reads by an older listing finds segments deleted; Floe lists again, a Spark or DuckDB query "
                f"fails; expected at least {format_duration(LONG_READER)}",
            )

    def combinations(self) -> Iterator[tuple[str, str]]:
        override = "or allow_short_times: true, where nobody else reads the store"
        if self.delete and not self.delete_grace and not self.allow_short_times:
            yield (
                "delete_grace",
                f"expected a time in which readers of an older listing end, as 24h, found 0s; {override}",
            )
        for index, level in enumerate(self.levels):
            if level.min_age < LEAST_AGE and not self.allow_short_times:
                found = format_duration(level.min_age)
                yield f"levels.{index}.min_age", f"expected at least 1m, found {found}; {override}"
        first: dict[int, int] = {}
        for index, level in enumerate(self.levels):
            other = first.setdefault(level.from_, index)
            if other != index:
                where = f"levels.{other} and levels.{index}"
                yield f"levels.{index}.from", f"expected each level read once, found {level.from_} in {where}"
