"""Values that stand elsewhere: `${VAR}` in a text, and `password_file` beside `password`.

Expanded after parsing, so a secret with `: #` in it cannot break the file. What was put in is not expanded
again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from common.settings.types import Expanded

MAX_SECRET_BYTES = 64 * 1024

_EXPRESSION = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^${}]*)?\}|\$\{")


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`text` with `${VAR}` and `${VAR:-default}` replaced, `$${` as `${`; itself where there is none.

    Raises ValueError where a variable is not set or an expression is not one of the two.
    """
    if "${" not in text:
        return text
    return Expanded(_EXPRESSION.sub(lambda match: _replacement(match, environment), text), text)


def _replacement(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match[0] == "$${":
        return "${"
    name, default = match["name"], match["default"]
    if name is None:
        raise ValueError("expected ${VAR} or ${VAR:-default}, found another expression; $${ stands for ${")
    if name in environment:
        return environment[name] or (default or "")[2:]
    if default is None:
        raise ValueError(f"expected the environment variable {name}, found it not set")
    return default[2:]


def read_secret(path: str) -> Expanded:
    """The content of the file `path` without one line end behind it.

    Raises ValueError, never with the content.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ValueError(f"expected a file that can be read, found {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8 text in {path}, found other bytes") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"expected at most {MAX_SECRET_BYTES} bytes in {path}, found more")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(f"expected a secret in {path}, found nothing")
    return Expanded(text, path)
