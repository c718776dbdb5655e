"""Addresses of servers and stores. Everything raises the error of `types.refuse`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from common.settings.types import refuse

_HOST_URL = re.compile(
    r"(?P<scheme>[a-z0-9]+)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]")
_IP = re.compile(r"[0-9]+(\.[0-9]+){3}")


def check_host_url(text: str, schemes: Sequence[str], credentials: str) -> str:
    """`text`, if it is `scheme://host[:port]` and no more; `credentials`: where user and password belong."""
    form = f"{' or '.join(f'{scheme}://HOST:PORT' for scheme in schemes)}"
    match = _HOST_URL.fullmatch(text)
    if "@" in text:
        raise refuse(f"{form} without user and password (they belong into {credentials})")
    if text.endswith("/"):
        raise refuse(f"{form} without a slash at its end")
    if not match or match["scheme"] not in schemes:
        raise refuse(f"{form} (an IPv6 address in brackets; no path)")
    if match["port"] and not 1 <= int(match["port"]) <= 65535:
        raise refuse(f"{form} with a port from 1 to 65535")
    return text


def check_store_url(text: str) -> str:
    """`text`, if it is `s3://BUCKET` or `file:///FOLDER`."""
    if "@" in text and not text.startswith("file://"):
        raise refuse(
            "s3://BUCKET without credentials (they belong into access_key_id and secret_access_key_file)"
        )
    if text.startswith("file://"):
        return _check_folder(text)
    scheme, _, bucket = text.partition("://")
    if scheme != "s3":
        raise refuse("s3://BUCKET or file:///FOLDER")
    if "/" in bucket:
        raise refuse("s3://BUCKET with nothing behind the bucket (a path belongs into prefix)")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IP.fullmatch(bucket):
        raise refuse(
            "s3://BUCKET, the bucket 3 to 63 of a-z 0-9 . -, beginning and ending with a letter or digit"
        )
    return text


def _check_folder(text: str) -> str:
    folder = unquote(text.removeprefix("file://"))
    if not folder.startswith("/") or folder.strip("/") == "" or ".." in folder.split("/") or "\0" in folder:
        raise refuse("file:///FOLDER with an absolute folder below /")
    return text
