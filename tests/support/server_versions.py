"""Differences of older nats-servers. `python -m tests.support.server_versions` records them again."""

import json
from pathlib import Path

from infra.local.nats import nats_server_binary
from tests.support import server_cases, server_cases_consumers, server_cases_publishing
from tests.support.server_calls import Texts, cases_of, real_answers, simulated_answers, texts

MODULES = (server_cases, server_cases_publishing, server_cases_consumers)  # modules that list their cases

DIFFERENCES = Path(__file__).parents[1] / "contract" / "older_servers.json"

OLDER = ("2.14", "2.12", "2.11", "2.10")


def expected_of(version: str, name: str) -> Texts:
    """Return the answers of a server to a script: those of the model, except the listed ones of older servers."""
    return texts(simulated_answers(name)) | json.loads(DIFFERENCES.read_text()).get(version, {}).get(name, {})


def main() -> None:
    found: dict[str, dict[str, Texts]] = {version: {} for version in OLDER}
    for version in OLDER:
        for name, steps in real_answers(nats_server_binary(version), cases_of(version)).items():
            model = texts(simulated_answers(name))
            if others := {step: text for step, text in texts(steps).items() if text != model.get(step)}:
                found[version][name] = others
    DIFFERENCES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
