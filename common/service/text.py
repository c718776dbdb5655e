"""Text for people."""

from __future__ import annotations


def escaped(text: str) -> str:
    """`text` with control characters and line ends escaped: data cannot forge lines or move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
