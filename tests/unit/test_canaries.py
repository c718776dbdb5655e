"""The search for canary secrets: a secret that is shown is found in every kind of output."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from common.settings.loader import parse_documents
from tests.scenarios.processes import Service
from tests.support import canaries

pytest_plugins = ("pytester",)
SECRET = "".join(("canary", "-of-the-", "canaries"))


def test_every_secret_of_a_configuration_is_noted():
    text = f"site: s\nstore: {{url: s3://floe, access_key_id: k, secret_access_key: {SECRET}-store}}\n"
    parse_documents(text.encode(), "f.yaml", {})
    assert canaries.shows_secret(f"x {SECRET}-store y")
    assert not canaries.shows_secret(SECRET)


def test_a_command_or_a_service_that_shows_one_fails(tmp_path: Path):
    secret = f"{SECRET}-command"
    SecretStr(secret)
    with pytest.raises(AssertionError, match="shows a secret") as caught:
        CliRunner().invoke(click.Command("x", callback=lambda: click.echo(secret)), [])
    assert secret not in str(caught.value)
    service = Service(tmp_path, "egress", "run")
    service.log.write_text(f"found {secret}")
    with pytest.raises(AssertionError, match="egress shows a secret"):
        service.wait(1)


def test_a_test_whose_output_shows_one_fails(pytester: pytest.Pytester):
    """Run pytest in a process of its own, with the hook of this suite."""
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.conftest import pytest_runtest_makereport\n"
    )
    pytester.makepyfile(
        "from pydantic import SecretStr\n"
        "def test_quiet():\n    SecretStr('a-secret-of-a-run')\n"
        "def test_shows():\n    print('a-secret-of-a-run')\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.no_fnmatch_line("*a-secret-of-a-run*")
