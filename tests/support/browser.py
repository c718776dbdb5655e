"""A headless browser that renders pages as a person sees them, without a network."""

import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
SECONDS = 120


def browse(folder: Path, url: str, *flags: str) -> str:
    """Run the browser once on `url`, with a profile of its own in `folder`; return its output."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom(folder: Path, url: str) -> str:
    """Return the document that the browser made of the page, as text."""
    return browse(folder, url, "--dump-dom")


def table_rows(document: str) -> list[list[str]]:
    """Return the texts of the cells of all rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", document, re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)]
        for row in rows
    ]


def bars(document: str, kind: str = "level") -> set[tuple[int, int, int]]:
    """Return the level, first and last sequence of each bar in the pictures of coverage."""
    found = re.findall(rf'<rect class="{kind}" data-level="(\d+)" data-rows="(\d+)\.\.(\d+)"', document)
    return {(int(level), int(first), int(last)) for level, first, last in found}
