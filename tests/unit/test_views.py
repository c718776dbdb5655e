"""What `floe segments ls --format duckdb|polars` writes, run in both engines over real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest

from common.segments.segment import SegmentRef
from common.segments.views import address, duckdb_view, polars_frame
from common.sequences import Stretch, cover
from common.settings.root import StoreSettings
from tests.support.compaction import CHAIN, Archive, ref

S3 = StoreSettings(
    url="s3://frozen", endpoint_url="http://127.0.0.1:9000", access_key_id="it", secret_access_key="hush"
)
Cover = list[Stretch[SegmentRef]]


def in_duckdb(found: Cover, store: StoreSettings, name: str = "archive") -> list[int]:
    with duckdb.connect() as connection:
        connection.execute(duckdb_view(found, store, name))
        return [row[0] for row in connection.execute(f"SELECT sequence FROM {name}").fetchall()]


def in_polars(found: Cover, store: StoreSettings, name: str = "archive") -> polars.DataFrame:
    scope: dict[str, Any] = {}
    exec(polars_frame(found, store, name), scope)
    frame = scope[name].collect()
    assert isinstance(frame, polars.DataFrame)
    return frame


@pytest.mark.parametrize("folder", ["it's", "a [b] * ?", "env=prod", "100%25", 'two "words"\\'])
def test_files_are_named_as_they_are_called(tmp_path: Path, folder: str):
    archive = Archive(tmp_path / folder)
    archive.put(1, 10)
    archive.put(5, 20)
    store = StoreSettings(url=f"file://{archive.folder}/store".replace("%", "%25"))
    found = cover(archive.listed(), 1)
    assert Path(address(store, found[0].segment.key)).exists()
    assert in_duckdb(found, store) == list(range(1, 21))
    frame = in_polars(found, store)
    assert frame["sequence"].to_list() == list(range(1, 21))
    assert frame["level"].unique().to_list() == [0]


def test_an_archive_without_segments_has_every_column_and_no_row(tmp_path: Path):
    archive = Archive(tmp_path)
    store = StoreSettings(url=f"file://{tmp_path}/store")
    empty = in_polars([], store)
    archive.put(1, 3)
    found = cover(archive.listed(), 1)
    assert empty.is_empty()
    assert empty.schema == in_polars(found, store).schema
    with duckdb.connect() as connection:
        connection.execute(duckdb_view([], store, "empty")).execute(duckdb_view(found, store, "whole"))
        assert connection.execute("SELECT * FROM empty").fetchall() == []
        empty_types, types = (connection.sql(f"DESCRIBE {name}").fetchall() for name in ("empty", "whole"))
        assert empty_types == types


def test_more_cut_segments_than_a_statement_may_have_parts(tmp_path: Path):
    archive = Archive(tmp_path)
    for first in range(1, 13):
        archive.put(first, first + 1)
    found = cover(archive.listed(), 1) * 30  # of another archive it would be another segment each time
    store = StoreSettings(url=f"file://{tmp_path}/store")
    text = duckdb_view(found, store, "archive")
    assert max(part.count("UNION ALL") for part in text.split("SELECT * FROM (")) <= 100
    assert in_duckdb(found, store) == in_polars(found, store)["sequence"].to_list() == [*range(1, 14)] * 30


def test_what_reaches_s3_is_in_the_file_and_no_secret():
    found = cover([ref(1, 10), ref(5, 20)], 1)
    view, frame = duckdb_view(found, S3, "archive"), polars_frame(found, S3, "archive")
    assert "hush" not in view + frame
    secret = (
        "-- CREATE OR REPLACE SECRET floe (TYPE s3, KEY_ID '…', SECRET '…', REGION 'us-east-1', "
        "ENDPOINT '127.0.0.1:9000', USE_SSL false, URL_STYLE 'path', SCOPE 's3://frozen');"
    )
    assert secret in view.splitlines()
    assert f"'s3://frozen/{found[0].segment.key}'" in view
    assert f'"s3://frozen/{found[0].segment.key}"' in frame
    assert "'aws_endpoint_url': 'http://127.0.0.1:9000', 'aws_allow_http': 'true'" in frame
    amazon = StoreSettings(url="s3://frozen", region="eu-west-1")
    assert "REGION 'eu-west-1', URL_STYLE 'vhost', SCOPE" in duckdb_view(found, amazon, "archive")
    assert "_options = {'aws_region': 'eu-west-1'}" in polars_frame(found, amazon, "archive")
    virtual = S3.model_copy(update={"addressing_style": "virtual", "endpoint_url": "https://s3.example.net"})
    assert "ENDPOINT 's3.example.net', USE_SSL true, URL_STYLE 'vhost'" in duckdb_view(found, virtual, "archive")
    assert "'aws_virtual_hosted_style_request': 'true'" in polars_frame(found, virtual, "archive")


def test_neighbours_that_are_taken_whole_are_read_together():
    found = cover([ref(1, 10), ref(11, 20), ref(15, 30), ref(31, 40), ref(41, 50)], 1)
    view = duckdb_view(found, S3, "archive")
    assert view.count("read_parquet") == 3
    assert view.count("WHERE") == 1
    assert "WHERE sequence BETWEEN 21 AND 30\nUNION ALL" in view
    assert "1 chain, each sequence once: floe segments ls --cover --format duckdb" in view.splitlines()[0]
    assert str(CHAIN) not in view
