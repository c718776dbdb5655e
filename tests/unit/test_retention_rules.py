"""What retention is configured to do, and what targets say that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.chain import Chain
from common.errors import ConfigError
from common.objects.local import LocalObjects
from common.segments.documents import ChainStore, Floor, TargetPositions
from common.segments.keys import Layout
from common.sequences import MAX_SEQUENCE
from common.settings.loader import parse
from common.settings.root import RetentionSettings
from compaction.retention import read_needs

A, B, LATER = Chain("us-east", "NODES"), Chain("eu-west", "NODES"), Chain("us-east", "NODES", 1)
DAY = 86_400.0


def settings_of(text: str) -> RetentionSettings:
    [found] = parse(f"store: {{url: s3://floe}}\ncompaction: {{retention: {text}}}\n", "f.yaml")
    return found.compaction.retention


@pytest.fixture
def documents(tmp_path: Path) -> ChainStore:
    return ChainStore(LocalObjects(tmp_path / "store"), Layout("data"))


def test_nothing_is_deleted_unless_that_is_said():
    assert settings_of("{}").of("us-east", "NODES") == (0.0, 0, None)
    assert settings_of("{max_age: 30d}").of("us-east", "NODES") == (30 * DAY, 0, None)
    with pytest.raises(ConfigError, match="delete_after"):
        settings_of("{delete_after: 30d}")


def test_an_entry_of_a_feed_stands_in_place_of_what_is_said_of_all_and_that_of_a_site_before_it():
    found = settings_of(
        "{max_age: 90d, max_bytes: 10G, feeds: [{feed: NODES, max_age: 365d}, "
        "{site: us-east, feed: NODES, max_bytes: 1G}, {feed: KEPT}]}"
    )
    assert found.of("eu-west", "OTHER") == (90 * DAY, 10 << 30, None)
    assert found.of("eu-west", "NODES") == (365 * DAY, 0, None)
    assert found.of("us-east", "NODES") == (0.0, 1 << 30, None)
    assert found.of("us-east", "KEPT") == (0.0, 0, None)
    with pytest.raises(ConfigError, match=r"one entry for each feed, found us-east/NODES in feeds.0 and feeds.1"):
        settings_of("{feeds: [{site: us-east, feed: NODES}, {site: us-east, feed: NODES, max_age: 2d}]}")


def test_of_two_times_from_which_on_all_is_kept_the_earlier_one_counts():
    found = settings_of(
        "{max_age: 90d, keep_from: '2026-01-02T03:04:05Z', "
        "feeds: [{feed: A, keep_from: '1970-01-01T00:00:01Z'}, {feed: B, max_age: 1d}]}"
    )
    held = 1_767_323_045 * 10**9
    assert found.of("s", "OTHER")[2] == found.of("s", "B")[2] == held
    assert found.of("s", "A") == (0.0, 0, 10**9)
    with pytest.raises(ConfigError, match="keep_from: expected a time"):
        settings_of("{keep_from: yesterday}")


@pytest.mark.parametrize("text", ["{max_age: 1h}", "{max_bytes: 5K}", "{feeds: [{max_age: 2d}]}"])
def test_what_would_delete_at_once_or_names_no_feed_is_refused(text: str):
    with pytest.raises(ConfigError):
        settings_of(text)


# Needs


def test_a_target_needs_what_lies_behind_its_position_and_all_of_a_chain_that_it_has_not_begun(documents: ChainStore):
    documents.write_positions(TargetPositions("FLEET", 1.0, {A: 31}, ("us-east/NODES",)))
    documents.write_positions(TargetPositions("COPY", 1.0, {A: 11}, ("us-east/NODES",)))

    needs = read_needs(documents, {})
    assert needs.of(A, 1) == (11, "COPY")
    assert needs.of(LATER, 5) == (5, "COPY")
    assert needs.of(B, 1) == (MAX_SEQUENCE, "")
    # The configuration lists another source by now, and ingress was not started again.
    assert read_needs(documents, {"FLEET": ["eu-west/NODES"]}).of(B, 3) == (3, "FLEET")


def test_a_target_that_was_released_needs_nothing(documents: ChainStore):
    documents.write_positions(TargetPositions("FLEET", 1.0, released=True))
    assert read_needs(documents, {"FLEET": ["us-east/NODES"]}).of(A, 1) == (MAX_SEQUENCE, "")


def test_a_configured_target_that_says_nothing_and_one_that_cannot_be_read_need_everything(documents: ChainStore):
    needs = read_needs(documents, {"FLEET": ["us-east/NODES"]})
    assert needs.of(B, 7) == (0, "FLEET")
    assert needs.unknown == {"FLEET": "it has not said yet how far it is"}
    documents.objects.put("data/_floe/ingress/SPOILED/positions.json", b"[]")
    needs = read_needs(documents, {})
    assert needs.of(A, 1) == (0, "SPOILED")
    assert "positions.json" in needs.unknown["SPOILED"]


def test_a_floor_says_since_when(documents: ChainStore):
    assert documents.floor(A) is None
    documents.raise_floor(A, 21)
    found = documents.floor(A)
    assert found is not None
    info = documents.objects.head(documents.layout.floor_document(A))
    assert info is not None
    assert found == Floor(21, info.modified)
    assert str(Floor(21, 1_767_323_045.5)) == "what was before 21 is gone by retention since 2026-01-02T03:04:05Z"
