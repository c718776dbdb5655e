"""`floe report latest` and `floe report traffic` with Spark: several runs add up to one whole run."""

import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

import floe
from common.archive.columns import record_batch
from common.archive.documents import ChainDocument, ChainStore
from common.archive.segment import Reason, Tip
from common.chain import Chain
from common.errors import DataError, Unavailable, UsageError
from common.objects.open import open_objects
from common.sequences import SequenceRange, cover
from common.settings.root import Settings, StoreSettings
from compaction import spark
from compaction.reports import ArchiveReport, FolderPlace, LatestReport, ReportRun, ReportState, key_of, newest_row
from compaction.run import Compaction, LocalRunner, Selection
from compaction.traffic import HOUR_NS, TrafficReport
from tests.support.basics import SharedS3, seeded
from tests.support.compaction import CHAIN, DUE, Archive
from tests.support.spark import SharedSpark

pytestmark = pytest.mark.spark

BEGIN_NS = 1_700_000_000 * 10**9 // HOUR_NS * HOUR_NS
OTHER = Chain("eu-west", "KV_STATE", 0, 0)


def batch(sequences: Sequence[int], salt: str = "") -> Any:
    """About 9 rows an hour: of keys a to e, or without a key on three subjects."""
    keys = [None if n % 4 == 0 else "abcde"[n % 5] for n in sequences]
    return record_batch(
        list(sequences),
        [BEGIN_NS + n * 400 * 10**9 + n % 7 for n in sequences],
        [b"bad.\xff" if n % 16 == 0 else b"nodes.%d" % (n % 3) for n in sequences],
        [b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n" if n % 9 == 0 else None for n in sequences],
        [b"payload %d %s" % (n, salt.encode()) for n in sequences],
        keys,
    )


class Fleet(Archive):
    """An archive with two chains; `script` puts the segments that are to come."""

    def __init__(self, folder: Path, rng: random.Random, segments: int = 7) -> None:
        super().__init__(folder)
        for chain in (CHAIN, OTHER):
            ChainStore(self.objects, self.layout).create_chain(chain, ChainDocument((), 1, 1))
        self.script: list[Callable[[], object]] = []
        for chain in (CHAIN, OTHER):
            first = 1
            for _ in range(segments):
                last = first + rng.randint(3, 15)
                kept = [n for n in range(first, last + 1) if rng.random() < 0.7]
                self.script.append(self._of(chain, first, last, kept))
                first = last + 1
        rng.shuffle(self.script)  # holes that are filled later

    def _of(self, chain: Chain, first: int, last: int, kept: list[int]) -> Callable[[], object]:
        missing = last - first + 1 - len(kept)
        ledger = {Reason.SAMPLED_OUT: missing} if missing else {}
        tip = Tip(last, BEGIN_NS + last * 400 * 10**9, "0" * 32)
        return lambda: self.put(first, last, batch(kept), chain=chain, ledger=ledger, tip=tip)

    def go_on(self, count: int | None = None) -> None:
        for put in self.script[:count]:
            put()
        del self.script[:count]

    def compact(self) -> None:
        self.age_all(700)
        Compaction(self.store, [DUE], 0, LocalRunner(self.store)).run(Selection())

    @property
    def settings(self) -> Settings:
        store = {"url": f"file://{self.folder}/store", "prefix": "data"}
        return Settings.model_validate({"store": store, "spool_dir": str(self.folder / "spool")})

    def report(
        self,
        kind: type[ArchiveReport],
        folder: Path,
        *,
        full: bool = False,
        since: int | None = None,
        place: Any = None,
    ) -> ReportRun:
        made = kind(SharedSpark(self.settings), self.store, place or FolderPlace(folder))
        wanted = ReportState(kind.name, f"file://{self.folder}/store/data", "all sites", {}, since)
        return made.run(wanted, [OTHER, CHAIN], full=full)


class Killed(Exception):
    """The end of a run."""


class KillingPlace(FolderPlace):
    """A folder that ends the run at a put: before the file is there, or behind."""

    def __init__(self, folder: Path, *, before: bool) -> None:
        super().__init__(folder)
        self.before = before

    def put(self, name: str, path: Path) -> None:
        if not self.before:
            super().put(name, path)
        raise Killed


@pytest.fixture
def rng() -> random.Random:
    return seeded()


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def naive_latest(fleet: Fleet) -> list[dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for chain in (CHAIN, OTHER):
        for each in fleet.read(chain).to_pylist():
            of = {"site": chain.site, "feed": chain.feed, "incarnation": 0, "partition": 0, **each}
            key = key_of(of)
            found[key] = newest_row([of, found.get(key, of)])
    return [found[key] for key in sorted(found)]


def test_the_registry_is_kept_current_through_kills_holes_and_compaction(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng), tmp_path / "out"
    for step in range(3):
        fleet.go_on(rng.randint(2, 5) if step < 2 else None)
        if step:
            former = (folder / "latest.parquet").read_bytes()
            with pytest.raises(Killed):
                fleet.report(LatestReport, folder, place=KillingPlace(folder, before=step % 2 == 0))
            assert (former == (folder / "latest.parquet").read_bytes()) is (step % 2 == 0)
        if step == 1:
            fleet.compact()
        fleet.report(LatestReport, folder)
        found = [{name: each[name] for name in each if name != "operation"} for each in rows_of(folder, "latest")]
        assert found == naive_latest(fleet)
    again = fleet.report(LatestReport, folder)
    assert (again.segments, again.rows, again.damaged) == (0, len(found), []), "only what is new is read"
    deleted = {each["sequence"] % 9 == 0: each["operation"] for each in rows_of(folder, "latest")}
    assert {True: deleted.get(True, "DEL"), False: deleted.get(False)} == {True: "DEL", False: None}


COUNTED = ("messages", "kept", "bytes", "sampled_out")


def sums(rows: list[dict[str, Any]], *names: str) -> list[int]:
    return [sum(each[name] for each in rows) for name in names]


def test_traffic_is_kept_current_as_one_run_would_have_made_it(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng), tmp_path / "out"
    for step in range(3):
        fleet.go_on(rng.randint(2, 6) if step < 2 else None)
        if step:
            with pytest.raises(Killed):
                fleet.report(TrafficReport, folder, place=KillingPlace(folder, before=step == 1))
        fleet.report(TrafficReport, folder)
    found = rows_of(folder, "traffic")
    fleet.report(TrafficReport, tmp_path / "whole")
    assert found == rows_of(tmp_path / "whole", "traffic")
    for chain, table in {chain: fleet.read(chain) for chain in (CHAIN, OTHER)}.items():
        of = [each for each in found if each["site"] == chain.site]
        hours = [n // HOUR_NS for n in table.column("timestamp_ns").to_pylist()]
        assert {int(e["hour"].timestamp()) // 3600: e["kept"] for e in of if e["kept"]} == {
            hour: hours.count(hour) for hour in hours
        }
        covered = sum(len(stretch.rows) for stretch in cover(fleet.listed(chain), 1))
        assert sums(of, "messages", "lag_known") == [covered, table.num_rows]
    # Merged segments have neither the lag nor the former ends, and nothing that was read before is forgotten.
    fleet.compact()
    assert (fleet.report(TrafficReport, folder).segments, rows_of(folder, "traffic")) == (0, found)
    fleet.report(TrafficReport, tmp_path / "late")
    late = rows_of(tmp_path / "late", "traffic")
    assert sums(late, *COUNTED) == sums(found, *COUNTED)
    of_hour = [(e["site"], e["hour"], e["kept"], e["bytes"]) for e in found if e["kept"]]
    assert [(e["site"], e["hour"], e["kept"], e["bytes"]) for e in late if e["kept"]] == of_hour
    assert sums(late, "lag_known") < sums(found, "lag_known")


def test_a_report_that_begins_later_reads_nothing_before(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng), tmp_path / "out"
    fleet.go_on()
    since = BEGIN_NS + 3 * HOUR_NS
    whole = fleet.report(TrafficReport, tmp_path / "whole")
    assert fleet.report(TrafficReport, folder, since=since).segments < whole.segments

    def kept(rows: list[dict[str, Any]]) -> list[Any]:
        begin = since // 10**9
        return [(e["site"], e["hour"], e["kept"]) for e in rows if e["kept"] and e["hour"].timestamp() >= begin]

    assert kept(rows_of(folder, "traffic")) == kept(rows_of(tmp_path / "whole", "traffic"))
    with pytest.raises(UsageError, match="begin again with --full"):
        fleet.report(TrafficReport, folder, since=since - HOUR_NS)


def test_unread_rows_that_other_segments_hold_are_in_a_report(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng, 0), tmp_path / "out"
    tip = Tip(10, BEGIN_NS + 4000 * 10**9, "0" * 32)
    fleet.put(1, 10, batch([1, 2]), tip=tip, ledger={Reason.GONE_BEFORE_READ: 8}, unread=SequenceRange(3, 10))
    fleet.report(TrafficReport, folder)
    assert sums(rows_of(folder, "traffic"), "kept") == [2]
    fleet.put(3, 9, batch([3, 4, 5]), tip=tip, ledger={Reason.DELETED: 4})
    for full, kept in ((False, 2), (True, 5)):  # the skipped rows are read again by --full only
        fleet.report(TrafficReport, folder, full=full)
        assert sums(rows_of(folder, "traffic"), "kept", "gone_before_read") == [kept, 10 - kept]
    fleet.report(LatestReport, folder)
    assert sorted(row["sequence"] for row in rows_of(folder, "latest")) == [1, 2, 3, 4, 5]


def test_a_run_that_is_asked_to_stop_leaves_the_former_report_and_the_next_resumes(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng, 1), tmp_path / "out"
    fleet.report(LatestReport, folder)
    fleet.go_on()
    [ref] = fleet.listed()
    sound = fleet.path(ref.key).read_bytes()
    fleet.path(ref.key).write_bytes(sound[:100] + bytes(8) + sound[108:])  # read again and again: it takes seconds
    former, asked = (folder / "latest.parquet").read_bytes(), threading.Event()

    def check() -> None:
        if asked.is_set():
            raise Unavailable("a signal")

    running = SharedSpark(fleet.settings)
    running.check = check
    made = LatestReport(running, fleet.store, FolderPlace(folder))
    threading.Timer(0.5, asked.set).start()
    with pytest.raises(Unavailable, match="a signal"):
        made.run(ReportState("latest", f"file://{fleet.folder}/store/data", "all sites", {}), [CHAIN], full=False)
    assert (folder / "latest.parquet").read_bytes() == former
    assert fleet.report(LatestReport, folder).damaged == [ref.key]
    fleet.path(ref.key).write_bytes(sound)
    assert fleet.report(LatestReport, folder).damaged == [], "named until it is put right"
    assert [each["payload"] for each in rows_of(folder, "latest")] == [each["payload"] for each in naive_latest(fleet)]


def test_a_file_of_something_else_is_refused_and_replaced_only_when_asked(tmp_path: Path, rng: random.Random):
    fleet, folder = Fleet(tmp_path, rng, 1), tmp_path / "out"
    fleet.report(LatestReport, folder)  # nothing is archived: an empty report, and no Spark
    assert rows_of(folder, "latest") == []
    made = LatestReport(SharedSpark(fleet.settings), fleet.store, FolderPlace(folder))
    with pytest.raises(UsageError, match="found one of latest of all sites"):
        made.run(ReportState("latest", "file:///elsewhere", "all sites", {}), [CHAIN], full=False)
    (folder / "latest.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match="expected a report of Floe"):
        fleet.report(LatestReport, folder)
    assert fleet.report(LatestReport, folder, full=True).rows == 0


# As commands


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "Spark", lambda settings, check: SharedSpark(settings))


def call(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(floe.cli, ["report", *words], prog_name="floe", catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_the_commands_write_files_into_a_directory(tmp_path: Path, rng: random.Random, shared: None):
    fleet, config, folder = Fleet(tmp_path, rng), tmp_path / "floe.yaml", tmp_path / "out"
    fleet.go_on()
    config.write_text(f"store: {{url: 'file://{tmp_path}/store', prefix: data}}\nspool_dir: {tmp_path}/spool\n")
    common = ("-c", str(config), "--output", str(folder))
    done = json.loads(call("latest", *common, "us-east/NODES", "--json").stdout)
    assert (done["report"], done["chains"], done["segments"], done["damaged"]) == ("latest", 1, 7, [])
    rows = rows_of(folder, "latest")
    assert {each["site"] for each in rows} == {"us-east"}
    query = "SELECT subject, decode(payload) FROM '{}' WHERE feed = 'NODES' AND operation IS NULL"
    values = duckdb.execute(query.format(folder / "latest.parquet")).fetchall()
    assert values == [(e["subject"], e["payload"].decode()) for e in rows if not e["operation"]]
    shown = call("traffic", *common, "--since", "2023-11-14T23:00:00Z").stdout.splitlines()
    assert shown[0].split() == ["report", "chains", "segments", "bytes", "rows", "damaged"]
    assert shown[1].split()[:2] == ["traffic", "2"]
    files = ["latest.parquet", "traffic.csv", "traffic.html", "traffic.parquet"]
    assert sorted(path.name for path in folder.iterdir()) == files
    lines = (folder / "traffic.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows_of(folder, "traffic"))
    assert lines[1].startswith("eu-west,KV_STATE,2023-11-14T23:00:00Z,")
    assert "us-east/NODES" in (folder / "traffic.html").read_text()
    assert "did you mean us-east?" in call("latest", *common, "us-esat", code=2).output
    assert "expected SITE[/FEED]" in call("latest", *common, "us-east/NODES/0000", code=2).output
    assert "another --output" not in call("traffic", *common).output
    assert "its own --output" in call("latest", *common, code=2).output


def test_a_report_of_an_archive_on_s3_is_beside_it(tmp_path: Path, s3: SharedS3, rng: random.Random, shared: None):
    store = {**s3.store(), "prefix": "data"}
    objects = open_objects(StoreSettings.model_validate(store))
    archive = Archive(tmp_path, objects)
    ChainStore(objects, archive.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    config = tmp_path / "floe.yaml"
    config.write_text(yaml.safe_dump({"store": store, "spool_dir": str(tmp_path / "spool")}))
    config.chmod(0o600)
    common = ("-c", str(config), "--output", f"{store['url']}/reports")
    archive.put(1, 20, batch(range(1, 21)))
    call("traffic", *common)
    archive.put(21, 30, batch(range(21, 31)))
    assert json.loads(call("traffic", *common, "--json").stdout)["segments"] == 1
    files = [f"reports/traffic.{ending}" for ending in ("csv", "html", "parquet")]
    assert [info.key for info in objects.list("reports/")] == files
    assert objects.download("reports/traffic.parquet", tmp_path / "traffic.parquet")
    assert sums(rows_of(tmp_path, "traffic"), "kept", "messages", "lag_known") == [30, 30, 30]
