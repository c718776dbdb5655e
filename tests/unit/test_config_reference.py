"""What is written about the configuration is what the models say: the reference file and the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.settings.ingress import CreateSettings
from common.settings.loader import parse
from common.settings.root import Settings, default_of, fields_of, sections_of
from common.settings.types import Section
from common.settings.yaml import Items, Keys, Node, Problems, parse_yaml, refuse
from tests.support.config_tables import every_key, with_tables

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "floe.reference.yaml").read_text()

# No default, or an entry of a list that shows a form.
EXAMPLES = {
    *(("site",), ("store", "url"), ("egress", "feeds"), ("egress", "feeds", "name"), ("egress", "feeds", "stream")),
    *(("ingress", "targets"), ("ingress", "targets", "stream"), ("ingress", "targets", "sources")),
    *(("ingress", "targets", "sources", key) for key in ("site", "feed")),
}
LEVELS = ("compaction", "levels")  # both entries together are the default, judged below


def tree(text: str) -> Keys:
    problems = Problems("floe.reference.yaml")
    [root] = parse_yaml(text.encode(), problems)
    refuse(problems)
    return root


def differences(node: Node, section: type[Section], path: tuple[str, ...] = ()) -> list[str]:
    """Keys that only one side has, and defaults that differ."""
    assert isinstance(node, Keys), path
    fields = fields_of(section)
    found = [f"{'.'.join((*path, name))}: only in one" for name in fields.keys() ^ node.entries.keys()]
    for name in fields.keys() & node.entries.keys():
        found += _key_differences(node.entries[name], section, name, (*path, name))
    return found


def _key_differences(node: Node, section: type[Section], name: str, path: tuple[str, ...]) -> list[str]:
    below = sections_of(fields_of(section)[name].annotation)
    if isinstance(node, Items) and below:
        return [difference for item in node.items for difference in differences(item, below[0], path)]
    if isinstance(node, Keys) and node.entries and below:
        return differences(node, below[0], path)
    if path in EXAMPLES or path[:2] == LEVELS or default_of(section, name) == _read(node, section, name):
        return []
    return [f"{'.'.join(path)}: the models say {default_of(section, name)!r}"]


def _read(node: Node, section: type[Section], name: str) -> Any:
    """The value of a file, as the program sees it."""
    from pydantic import TypeAdapter

    return TypeAdapter(fields_of(section)[name].rebuild_annotation()).validate_python(_plain(node))


def _plain(node: Node) -> Any:
    if isinstance(node, Keys):
        return {name: _plain(value) for name, value in node.entries.items()}
    if isinstance(node, Items):
        return [_plain(item) for item in node.items]
    return node.value()


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


def test_the_page_on_configuration_is_up_to_date_and_gives_every_key_a_meaning():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert with_tables(page) == page, "python -m tests.support.config_tables docs/configuration.md"
    assert [key.path for key in every_key() if not key.meaning] == []
