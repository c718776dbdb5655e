"""The reference file and the example of the configuration, compared with the models."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic_core import PydanticUndefined

from common.errors import ConfigError
from common.settings.ingress import CreateSettings
from common.settings.loader import ConfigDocument, find_loops, load, parse, parse_documents
from common.settings.root import Settings, fields_of, sections_of
from common.settings.types import Section
from common.settings.yaml import ListNode, MappingNode, Node, Problems, parse_yaml, raise_problems
from tests.support.config_keys import every_key, plain

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "floe.reference.yaml").read_text()

# Keys without a default, or an entry of a list that shows the form.
EXAMPLES = {
    *(("site",), ("store", "url"), ("egress", "feeds"), ("egress", "feeds", "name"), ("egress", "feeds", "stream")),
    *(("ingress", "targets"), ("ingress", "targets", "stream"), ("ingress", "targets", "sources")),
    *(("ingress", "targets", "sources", key) for key in ("site", "feed")),
}
LEVELS = ("compaction", "levels")  # both entries together are the default, checked below


def tree(text: str) -> MappingNode:
    problems = Problems("floe.reference.yaml")
    [root] = parse_yaml(text.encode(), problems)
    raise_problems(problems)
    return root


def differences(node: Node, section: type[Section], path: tuple[str, ...] = ()) -> list[str]:
    """Return keys that only one side has, and defaults that differ."""
    assert isinstance(node, MappingNode), path
    fields = fields_of(section)
    found = [f"{'.'.join((*path, name))}: only in one" for name in fields.keys() ^ node.entries.keys()]
    for name in fields.keys() & node.entries.keys():
        found += _key_differences(node.entries[name], section, name, (*path, name))
    return found


def _key_differences(node: Node, section: type[Section], name: str, path: tuple[str, ...]) -> list[str]:
    below = sections_of(fields_of(section)[name].annotation)
    if isinstance(node, ListNode) and below:
        return [difference for item in node.items for difference in differences(item, below[0], path)]
    if isinstance(node, MappingNode) and node.entries and below:
        return differences(node, below[0], path)
    if path in EXAMPLES or path[:2] == LEVELS or _default_of(section, name) == _read(node, section, name):
        return []
    return [f"{'.'.join(path)}: the models say {_default_of(section, name)!r}"]


def _default_of(section: type[Section], name: str) -> Any:
    """Return the default as the program sees it; None for a key without one."""
    field = fields_of(section)[name]
    if field.default is PydanticUndefined:
        return None
    return TypeAdapter(field.rebuild_annotation()).validate_python(field.default)


def _read(node: Node, section: type[Section], name: str) -> Any:
    """Return the value of a file as the program reads it."""
    return TypeAdapter(fields_of(section)[name].rebuild_annotation()).validate_python(plain(node))


def test_the_reference_has_every_key_with_its_default_and_no_other():
    assert differences(tree(REFERENCE), Settings) == []


def test_the_reference_is_a_valid_configuration_whose_levels_and_example_of_create_are_whole():
    [settings] = parse(REFERENCE, "floe.reference.yaml")
    assert settings.egress.feeds[0].segment.max_age == 300.0
    assert settings.compaction.levels == Settings(store={"url": "s3://floe"}).compaction.levels
    [example] = re.findall(r"create: null\s+# example: (\{.*\})", REFERENCE)
    assert tree(f"create: {example}").entries["create"].entries.keys() == fields_of(CreateSettings).keys()


@pytest.mark.parametrize("change", ["  workers: 2  ", "  wurkers: 1  "])
def test_the_comparison_sees_another_default_and_another_key(change: str):
    assert differences(tree(REFERENCE.replace("  workers: 1  ", change)), Settings) != []


def test_every_key_has_a_meaning():
    assert [key.path for key in every_key() if not key.meaning] == []


# The example, and configurations that cannot be run

HEAD = "site: s\nstore: {url: s3://floe}\n"


def example() -> list[ConfigDocument]:
    environment = {"FLOE_S3_KEY": "key", "FLOE_S3_SECRET": "secret"}
    return parse_documents((ROOT / "floe.example.yaml").read_bytes(), "floe.example.yaml", environment)


def test_both_documents_of_the_example_are_valid_and_nothing_in_them_is_refused():
    site, centre = (found.settings for found in example())
    assert [feed.name for feed in site.egress.feeds] == ["NODE_DATA", "NODE_DATA_FULL", "NODE_DATA_ADVISORIES"]
    assert site.egress.feeds[0].sampling_key == "inspect_field"
    [target] = centre.ingress.targets
    assert (target.stream, target.subjects_to_create()) == ("FLEET", ("fleet.>",))
    pairs = [(site, feed) for site in ("us-east", "eu-west") for feed in ("NODE_DATA", "NODE_DATA_ADVISORIES")]
    assert target.sources[0].site_feed_pairs() == pairs
    for found in example():
        assert not find_loops(found)


def test_a_target_that_flows_into_itself_cannot_be_run(tmp_path: Path):
    targets = "ingress: {targets: [{stream: A, sources: [{site: s, feed: A}]}]}\n"
    (tmp_path / "f.yaml").write_text(f"{HEAD}egress: {{feeds: [{{stream: A}}]}}\n{targets}")
    with pytest.raises(ConfigError, match=r"4:43: ingress.targets.0.sources.0: expected a stream other than"):
        load(str(tmp_path / "f.yaml"))
