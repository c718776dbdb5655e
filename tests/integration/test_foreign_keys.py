"""What stands in a bucket and nothing reads: foreign keys, and segments behind a delete marker."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest

from common.objects.open import open_objects
from common.objects.port import Paged
from common.segments.checks import Foreign, look_for_foreign
from common.segments.documents import ChainDocument, ChainStore
from common.settings.root import StoreSettings
from compaction.verify import VerifyProblem, verify_chains
from tests.support.basics import SharedS3
from tests.support.compaction import CHAIN, Archive

pytestmark = pytest.mark.servers

JUNK = (
    "data/README",
    "data/_floe/notes.txt",
    "data/_floe/tombstones/site=us-east/feed=NODES/incarnation=0000/partition=0/old.json",
    "data/site=us east/feed=NODES/incarnation=0000/partition=0/level=0/x.parquet",
    "data/site=us-east/feed=NODES/incarnation=0000/partition=0/level=0/0.parquet.tmp",
)


def archive_in(folder: Path, s3: SharedS3, bucket: str = "") -> Archive:
    archive = Archive(folder, open_objects(StoreSettings.model_validate(s3.store(bucket))))
    ChainStore(archive.objects, archive.layout).create_chain(CHAIN, ChainDocument((), 1, 1))
    for first in (1, 11, 21):
        archive.put(first, first + 9)
    return archive


def problems_of(archive: Archive) -> list[VerifyProblem]:
    return list(verify_chains(archive.store, ChainStore(archive.objects, archive.layout), [CHAIN])[0].problems)


def test_foreign_keys_are_counted_and_named(tmp_path: Path, s3: SharedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_in(tmp_path, s3)
    for key in JUNK:
        archive.objects.put(key, b"?")
    monkeypatch.setattr("common.objects.s3.PAGE_KEYS", 2)

    assert isinstance(archive.objects, Paged)
    found = look_for_foreign(archive.objects, archive.layout)
    assert (sorted(found.keys), found.count, found.is_whole) == (sorted(JUNK), len(JUNK), True)
    assert f"nothing reads: {len(JUNK)}" in found.lines()[0]
    places = archive.layout.places(CHAIN)
    assert sorted(look_for_foreign(archive.objects, archive.layout, places).keys) == [JUNK[2], JUNK[4]]
    assert Foreign(["a\nerror: b"], 1, 1).lines()[1] == "  a\\nerror: b"
    assert not look_for_foreign(archive.objects, archive.layout, limit=2).is_whole
    archive.store.delete(archive.store.list(CHAIN)[1])
    [hole] = problems_of(archive)
    assert hole.hint.startswith("the source may still hold them"), "a store without versions is no trouble"


def test_a_delete_marker_in_a_hole_is_named_with_the_version_that_exists(tmp_path: Path, s3: SharedS3) -> None:
    bucket = s3.new_bucket()
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=s3.endpoint_url,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        region_name="us-east-1",
    )
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    archive = archive_in(tmp_path, s3, bucket)
    lost = archive.store.list(CHAIN)[1]
    [kept] = client.list_object_versions(Bucket=bucket, Prefix=lost.key)["Versions"]
    archive.store.delete(lost)

    [hole] = problems_of(archive)
    assert hole.kind == "hole"
    assert f"a delete marker hides {lost.key}, of which version {kept['VersionId']} exists" in hole.hint
    assert hole.hint.index("delete marker") < hole.hint.index("the source may still hold them")
    [marker] = client.list_object_versions(Bucket=bucket, Prefix=lost.key)["DeleteMarkers"]
    assert marker["VersionId"] in hole.hint
    client.delete_object(Bucket=bucket, Key=lost.key, VersionId=marker["VersionId"])
    assert problems_of(archive) == []
