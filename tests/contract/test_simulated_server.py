"""The simulated nats-server compared with real ones: one script of calls on both, and every answer compared."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.local.nats import nats_server_binary
from tests.support.server_calls import CASES, Steps, cases_of, real_answers, simulated_answers, texts
from tests.support.server_versions import DIFFERENCES, OLDER, expected_of

pytestmark = pytest.mark.servers

NEWEST = ""
VERSIONS = (NEWEST, *OLDER)


def answers_of(version: str) -> dict[str, Steps]:
    names = cases_of(version)
    return real_answers(nats_server_binary(version), names, {name: expected_of(version, name) for name in names})


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Steps]]:
    """Return the answers of all versions, which run concurrently because they mostly wait."""
    for name in CASES:  # these cannot run in threads
        simulated_answers(name)
    with ThreadPoolExecutor(1 + len(OLDER)) as pool:
        return dict(zip(VERSIONS, pool.map(answers_of, VERSIONS), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_model_answers_as_the_newest_server(name: str, answers: dict[str, dict[str, Steps]]) -> None:
    assert simulated_answers(name) == answers[NEWEST][name]


@pytest.mark.parametrize("version", OLDER)
def test_older_servers_answer_as_the_model_but_for_what_is_listed(
    version: str, answers: dict[str, dict[str, Steps]]
) -> None:
    for name in cases_of(version):
        found, model = texts(answers[version][name]), texts(simulated_answers(name))
        listed = expected_of(version, name).items()
        # A later patch than the one that was listed may answer as the newest server does.
        assert found == {step: model[step] if found.get(step) == model[step] else text for step, text in listed}, name


def test_what_is_listed_of_older_servers_exists() -> None:
    listed = json.loads(DIFFERENCES.read_text())
    assert tuple(listed) == OLDER
    for cases in listed.values():
        for name, steps in cases.items():
            assert steps.keys() <= texts(simulated_answers(name)).keys(), name
