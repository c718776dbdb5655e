"""Keys that are agreed and not built yet are refused where they are set, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings.loader import ConfigDocument, load, note_unbuilt, parse_documents, refuse_unrunnable
from common.settings.yaml import Problems, refuse

EXAMPLE = Path(__file__).parents[2] / "floe.example.yaml"
HEAD = "site: s\nstore: {url: s3://floe}\n"
NOT_BUILT = "not built yet in this version; remove it or leave it at its default"


@pytest.fixture(autouse=True)
def one_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.settings.loader.UNBUILT", ("compaction.delete_grace",))


def document(text: str) -> ConfigDocument:
    [found] = parse_documents(text.encode(), "f.yaml", {})
    return found


def refuse_unbuilt(found: ConfigDocument) -> None:
    problems = Problems(found.name)
    note_unbuilt(found, problems)
    refuse(problems)


def example() -> list[ConfigDocument]:
    environment = {"FLOE_S3_KEY": "key", "FLOE_S3_SECRET": "secret"}
    return parse_documents(EXAMPLE.read_bytes(), "floe.example.yaml", environment)


def test_both_documents_of_the_example_are_valid_and_nothing_in_them_is_refused():
    site, centre = (found.settings for found in example())
    assert [feed.name for feed in site.egress.feeds] == ["NODE_DATA", "NODE_DATA_FULL", "NODE_DATA_ADVISORIES"]
    assert site.egress.feeds[0].sampling_key == "inspect_field"
    [target] = centre.ingress.targets
    assert (target.stream, target.subjects_to_create()) == ("FLEET", ("fleet.>",))
    pairs = [(site, feed) for site in ("us-east", "eu-west") for feed in ("NODE_DATA", "NODE_DATA_ADVISORIES")]
    assert target.sources[0].pairs() == pairs
    for found in example():
        refuse_unbuilt(found)
        refuse_unrunnable(found)


def test_a_key_is_refused_where_it_stands_unless_at_its_default_and_others_beside_it_are_not(tmp_path: Path):
    others = HEAD + "nats: {context: prod}\ningress: {targets: [{stream: T, sources: [{site: s, feed: f}]}]}\n"
    refuse_unbuilt(document(others + "compaction: {delete_grace: 1d}\n"))
    (tmp_path / "f.yaml").write_text(others + "compaction: {delete_grace: 30d}\n")
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "f.yaml"))
    told = f"{tmp_path}/f.yaml:5:28: compaction.delete_grace: {NOT_BUILT} (24h)"
    assert list(caught.value.problems) == [told]


def test_a_target_that_flows_into_itself_cannot_be_run():
    targets = "ingress: {targets: [{stream: A, sources: [{site: s, feed: A}]}]}\n"
    with pytest.raises(ConfigError, match=r"4:43: ingress.targets.0.sources.0: expected another stream"):
        refuse_unrunnable(document(f"{HEAD}egress: {{feeds: [{{stream: A}}]}}\n{targets}"))
