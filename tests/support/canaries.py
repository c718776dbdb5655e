"""Secrets of the whole run, and the check that no output holds one.

Noted are the keys of the stores, the secrets made for NATS, and every secret of a configuration in the tests' own
process. Checked are the outputs of commands and services, and all that pytest captures.
"""

from typing import Any

from pydantic import SecretStr

LEAST = 12  # characters; a shorter secret may be in an output by chance

_known: set[str] = set()


def note(*secrets: str) -> None:
    """Note secrets that no output may show."""
    _known.update(secret for secret in secrets if len(secret) >= LEAST)


def shows_secret(text: str) -> bool:
    """True if `text` contains a noted secret."""
    return any(secret in text for secret in _known)


def check(text: str, where: str) -> None:
    """Fail if `text` contains a secret, without showing it again."""
    assert not shows_secret(text), f"{where} shows a secret"


def watch() -> None:
    """Note every secret of a configuration from now on, and check every run of a command in this process."""
    from click.testing import CliRunner

    made, invoked = SecretStr.__init__, CliRunner.invoke

    def noted(self: SecretStr, value: str) -> None:
        made(self, value)
        note(value)

    def checked(self: CliRunner, *arguments: Any, **named: Any) -> Any:
        result = invoked(self, *arguments, **named)
        check(result.output, "a command")
        return result

    SecretStr.__init__ = noted  # type: ignore[method-assign]
    CliRunner.invoke = checked  # type: ignore[method-assign]
