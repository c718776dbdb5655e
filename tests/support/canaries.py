"""Secrets of the whole run, and the check that no output holds one.

Noted are the keys of the stores, what is made for NATS, and every secret of a configuration in the tests' own
process; asked of are commands, services and whatever pytest captures.
"""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

LEAST = 12  # characters; what is shorter may stand in an output by chance

_known: set[str] = set()


def note(*secrets: str) -> None:
    """None of these may ever be shown."""
    _known.update(secret for secret in secrets if len(secret) >= LEAST)


def shows_secret(text: str) -> bool:
    """Whether a noted secret stands in `text`."""
    return any(secret in text for secret in _known)


def check(text: str, where: str) -> None:
    """Fails where `text` holds a secret, without showing it again."""
    assert not shows_secret(text), f"{where} shows a secret"


def watch() -> None:
    """From now on every secret of a configuration is noted, and every run of a command in this process checked."""
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
