"""Retention of the archive by `floe compact`, on S3 and in a folder: deleted and kept segments, and its output."""

import time
from pathlib import Path
from typing import Any

import pytest

from common.archive.captures import CapturedConfig, CapturedConsumers, CaptureStore
from common.archive.documents import ChainDocument, TargetPositions
from common.archive.guard import SegmentGone
from common.archive.segment import SegmentRef
from common.chain import Chain
from common.clock import format_time
from common.objects.open import open_objects
from common.sequences import SequenceRange, Stretch
from common.settings.root import StoreSettings
from compaction.retention import Retention, RetentionRule
from compaction.source import read_stretch
from compaction.verify import verify_chains
from tests.integration import test_compaction_cli as compaction_cli
from tests.support.basics import SharedS3, raises_code
from tests.support.compaction import CHAIN, at_once, rows
from tests.support.proxies import FaultProxy, refusing_conditions

# Half an hour over the week: the time that a test takes does not change the output.
LEVEL = {**compaction_cli.LEVEL, "min_age": "7d30m", "max_wait": "7d30m"}
DAY, PAIR = 86_400, "us-east/NODES"
LATER, SLICE = Chain("us-east", "NODES", 1), Chain("us-east", "NODES", 1, 1)


def ns(days: float) -> int:
    """The time `days` ago, in nanoseconds."""
    return int((time.time() - days * DAY) * 1e9)


class Site(compaction_cli.Site):
    """A site with configured retention, on any store."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.store_config = config
        super().__init__(folder, open_objects(StoreSettings.model_validate(config)))
        self.captures = CaptureStore(self.layout, self.objects)

    def begin(self, *chains: Chain) -> None:
        for chain in chains:
            self.chains.create_chain(chain, ChainDocument((), 1, 1))

    def old(self, first: int, last: int, days: float, **more: Any) -> SegmentRef:
        """Put a segment with a newest message that is so many days old, at any time of the put."""
        return self.put(first, last, rows(range(first, last + 1), at_ns=ns(days)), **more)

    def month(self, chain: Chain = CHAIN) -> None:
        """Put 1..50: 40, 35, 31, 5 and 0 days old."""
        for first, days in zip(range(1, 50, 10), (40, 35, 31, 5, 0), strict=True):
            self.old(first, first + 9, days, chain=chain)

    def configure(self, *targets: str, compaction: dict[str, Any] | None = None, **retention: Any) -> None:
        source = {"site": "us-east", "feed": "NODES", "subject_prefix": "x"}
        merging = {**at_once(LEVEL), **(compaction or {}), "retention": retention}
        targets = [{"stream": name, "sources": [source]} for name in targets]
        self.write(self.store_config, merging, ingress={"targets": targets})

    def floe(self, *words: str, code: int = 0) -> Any:
        return self._floe(*words, "-c", str(self.config), code=code)

    def compact(self, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = self.floe("compact", *options, "--json")["retention"]
        return found

    def write_position(self, target: str = "FLEET", **positions: int) -> None:
        """Write that a target holds everything of the chain before the sequence `at`."""
        at = {CHAIN: positions["at"]} if positions else {}
        self.chains.write_positions(TargetPositions(target, time.time(), at, (PAIR,)))

    def floor(self, chain: Chain = CHAIN) -> int | None:
        return self.chains.read_floor(chain)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, {"url": f"file://{tmp_path}/store", "prefix": "data"})


@pytest.fixture
def bucket(tmp_path: Path, s3: SharedS3) -> Site:
    return Site(tmp_path, {**s3.store(), "prefix": "data"})


@pytest.fixture(params=["site", pytest.param("bucket", marks=pytest.mark.servers)])
def kept(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


# Deletions


@pytest.mark.servers
def test_a_store_that_refuses_conditions_keeps_everything(bucket: Site, s3: SharedS3):
    """Floors have no arbiter there; merges need none."""
    bucket.month()
    kept = bucket.ranges()
    with refusing_conditions(FaultProxy(s3.endpoint_url), 501) as proxy:
        bucket.store_config["endpoint_url"] = proxy.url
        bucket.configure(max_age="30d")
        assert "E-STORE-CONDITIONS" in bucket.floe("compact", code=78).err
        bucket.configure()
        bucket.floe("compact")
    assert (bucket.ranges(), bucket.floor()) == (kept, None)


def test_older_rows_go_from_the_beginning_behind_a_raised_floor(kept: Site):
    kept.month()
    before = kept.listed()
    kept.configure(max_age="30d")

    planned = kept.floe("compact", "--dry-run").out.splitlines()
    assert [line.split()[:3] for line in planned[1:4]] == [["expire", s.key, str(s.size)] for s in before[:3]]
    assert all(line.endswith("floor 31") for line in planned[1:4])
    [total] = planned[4:]
    assert "no merge; 3 segments," in total
    foretold = kept.compact("--dry-run")
    assert (kept.listed(), kept.floor()) == (before, None)

    lines = kept.floe("compact", "us-east/NODES").out.splitlines()
    assert lines[1].split()[:6] == ["expired", "us-east/NODES/0000/0", "0", "before", "31", "3"]
    assert [each["key"] for each in foretold["expired"]] == [s.key for s in before[:3]]
    assert foretold["floors"] == [{**CHAIN.log_context(), "floor": 31}]
    assert (kept.ranges(), kept.floor()) == (["0:31..40", "0:41..50"], 31)
    kept.floe("segments", "verify")
    about = kept.floe("segments", "info", "--json", "us-east/NODES")
    assert (about["floor"], about["holes"]) == (31, [])
    assert about["floor_since"].startswith("20")
    assert kept.floe("compact", "us-east/NODES").out == "nothing to do: no segment of 1 chain is due\n"


def test_the_oldest_goes_first_above_the_size(site: Site):
    for first in range(1, 50, 10):
        site.put(first, first + 9)
    site.put(1, 10, level=1)  # in its grace: its rows count once
    retention = Retention(site.store, lambda _site, _feed: RetentionRule(max_bytes=3 * site.listed()[0].size + 900), {})
    retention.apply([CHAIN], time.time(), lambda: None)
    assert site.ranges() == ["0:21..30", "0:31..40", "0:41..50"]


@pytest.mark.parametrize(
    ("options", "compaction"), [(["--level", "0"], {}), (["us-east/NODES/0/0"], {}), ([], {"delete": False})]
)
def test_parts_of_feeds_and_runs_that_delete_nothing_leave_all(
    site: Site, options: list[str], compaction: dict[str, Any]
):
    site.month()
    site.configure(max_age="30d", compaction=compaction)
    assert site.compact(*options) == {"expired": [], "captures": [], "floors": [], "held": []}
    assert (site.compact("--dry-run", *options)["expired"], len(site.ranges()), site.floor()) == ([], 5, None)


def test_late_rows_below_the_floor_go_with_the_next_run_and_leave_no_hole(site: Site):
    for first, days in ((1, 40), (31, 35), (41, 1), (51, 0)):
        site.old(first, first + 9, days)
    site.configure(max_age="30d")
    site.compact()
    assert (site.ranges(), site.floor()) == (["0:41..50", "0:51..60"], 41)
    late = site.old(11, 30, 38)
    site.old(35, 45, 33)
    assert [each["key"] for each in site.compact()["expired"]] == [late.key]
    assert site.ranges() == ["0:35..45", "0:41..50", "0:51..60"]
    site.floe("segments", "verify")


def test_a_corrupt_floor_deletes_nothing_and_is_logged_once(site: Site):
    site.month()
    site.objects.put(site.layout.floor_document(CHAIN), b"{}")
    site.configure(max_age="30d")
    assert "E-STATE-JSON" in site.floe("compact", "us-east/NODES", code=3).err
    site.floe("compact", "us-east/NODES/0/0")  # without retention
    assert "reported before" in site.floe("compact", "us-east/NODES").err
    assert len(site.ranges()) == 5


# Rows that a target needs


def test_an_idle_target_holds_retention_until_it_is_released(site: Site, tmp_path: Path):
    site.month()
    site.configure("FLEET", max_age="30d")
    metrics = tmp_path / "floe.prom"

    [held] = site.compact()["held"]  # it has no position yet
    assert (held["target"], held["first"], held["why"]) == ("FLEET", 1, "it has not reported its positions yet")
    site.write_position(at=15)
    site.configure(max_age="30d")  # also one that this configuration does not name
    assert [each["bytes"] for each in site.compact("--dry-run")["held"]] == [sum(s.size for s in site.listed()[1:3])]
    done = site.floe("compact", "--metrics-textfile", str(metrics), "us-east/NODES")
    assert (site.floor(), site.ranges()[0]) == (11, "0:11..20")
    [line] = (line.split() for line in done.out.splitlines() if line.startswith("held"))
    assert (line[1], line[-1]) == ("us-east/NODES/0000/0", "FLEET")
    logged = [each for each in done.err.splitlines() if "retention held" in each]
    assert logged
    assert all(each.startswith("warning: ") for each in logged), "lines for people, no log"
    assert not any("error" in each for each in logged), "its position is the reason"
    held_bytes = sum(s.size for s in site.listed()[:2])
    assert f'floe_compaction_retention_held_bytes{{target="FLEET"}} {held_bytes}' in metrics.read_text()
    assert "floe_compaction_expired_segments 1.0" in metrics.read_text()

    site.floe("checkpoint", "release", "FLEET", "--yes")
    site.floe("compact", "--metrics-textfile", str(metrics), "us-east/NODES")
    assert (site.floor(), site.ranges()) == (31, ["0:31..40", "0:41..50"])
    assert "retention_held_bytes{" not in metrics.read_text()


def test_rows_an_operator_moves_back_to_while_floors_rise_are_not_deleted(site: Site):
    site.month()
    site.write_position(at=45)
    retention = Retention(site.store, lambda _site, _feed: RetentionRule(30 * DAY), {})

    retention.apply([CHAIN], time.time(), lambda: site.write_position(at=15))

    assert (site.floor(), site.ranges()[0]) == (31, "0:11..20")
    site.write_position(at=45)
    retention.apply([CHAIN], time.time(), lambda: None)
    assert site.ranges() == ["0:31..40", "0:41..50"]


# Readers that meet a raised floor


def expire(site: Site) -> None:
    Retention(site.store, lambda _site, _feed: RetentionRule(30 * DAY), {}).apply([CHAIN], time.time(), lambda: None)


def test_deletions_during_verify_are_no_holes_and_a_query_that_reads_gone_rows_shows_since_when(site: Site):
    site.month()
    ref, seen = site.listed()[1], list[str]()

    def note(ref: SegmentRef, _footer: object) -> None:
        if not seen:
            expire(site)
        seen.append(str(ref.coverage))

    assert verify_chains(site.store, site.chains, [CHAIN], window=1, on_segment=note)[0].problems == []
    assert seen == ["1..10", "31..40", "41..50"]
    why = "us-east/NODES/0000/0: retention deleted the sequences before 31 at 20"
    with raises_code(SegmentGone, "E-FLOOR", match=why):
        list(read_stretch(site.store, Stretch(ref, SequenceRange(11, 20))))


def captured(kept: Site, *ends: int, chain: Chain = CHAIN) -> None:
    for end in ends:
        kept.captures.put(chain, CapturedConfig(format_time(ns(0)), end, format_time(ns(50)), {"name": "NODES"}))
        kept.captures.put(chain, CapturedConsumers(format_time(ns(0)), end, ()))


def ends(kept: Site, kind: str, chain: Chain = CHAIN) -> list[int]:
    return [ref.end for ref in kept.captures.list_captures(chain, kind)]


def test_captures_that_no_restore_takes_any_more_go_with_the_floor(kept: Site):
    kept.month()
    kept.configure(max_age="30d")
    captured(kept, 0, 5, 25, 31, 32, 50)
    foretold = kept.compact("--dry-run")["captures"]
    assert ends(kept, "config") == [0, 5, 25, 31, 32, 50], "foretold only"
    done = kept.compact()
    assert (kept.floor(), done["captures"], len(foretold)) == (31, foretold, 6)
    assert ends(kept, "config") == ends(kept, "consumers") == [31, 32, 50]
    assert kept.compact()["captures"] == []


def test_captures_stay_as_long_as_one_partition_needs_them_and_the_last_below_the_floor(kept: Site):
    kept.begin(LATER, SLICE)
    for chain in (CHAIN, LATER):
        kept.month(chain)
    captured(kept, 3, 7)
    kept.old(1, 20, 35, chain=SLICE)
    kept.old(21, 50, 0, chain=SLICE)
    kept.configure(max_age="30d")
    captured(kept, 5, 20, 25, 40, chain=LATER)
    kept.compact()
    assert (kept.floor(LATER), kept.floor(SLICE), ends(kept, "config", LATER)) == (31, 21, [20, 25, 40])
    assert ends(kept, "config") == [7]
    assert kept.captures.config(CHAIN, 31) is not None
