"""Opening the object store and the queue of notifications that the settings name."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from common.errors import FloeError, Refused
from common.logs import get_logger
from common.objects.local import LocalObjects
from common.objects.port import ChecksumMismatch, ObjectStore
from common.settings.types import FileSecret

if TYPE_CHECKING:
    from common.objects.s3 import S3Account
    from common.objects.sqs import SqsQueue
    from common.settings.root import StoreSettings

log = get_logger(__name__)

VIEW_TIMEOUT_S = 5.0  # seconds for an answer of the store, in each of two attempts, if a person waits for it


def open_objects(settings: StoreSettings, *, timeout: float | None = None, creates: bool = True) -> ObjectStore:
    """Return the object store that `settings` name. Sends no request to an S3 store yet.

    `timeout`: for a caller that does not wait as long as services do: seconds for a connection, and for an answer to
    begin; a request is sent at most twice. `creates`: make the folder of a `file://` store that is missing.

    Raises ConfigError for an invalid address, and for a `file://` store the errors of `LocalObjects`.
    """
    scheme, _, rest = settings.url.partition("://")
    secret = settings.secret_access_key
    if scheme == "file":
        return LocalObjects(Path(unquote(rest)), creates=creates)
    # boto3 takes 0.2 s of processor time and 20 MB, and a store in a folder needs none of it.
    from common.objects.s3 import S3Objects, S3Options

    options = S3Options(
        addressing_style=settings.addressing_style,
        checksum=settings.checksum,
        storage_class=settings.storage_class,
        encryption=settings.encryption.mode,
        kms_key_id=settings.encryption.kms_key_id,
        conditional_puts=settings.conditional_puts,
    )
    if timeout is not None:
        options = replace(options, attempts=2, connect_timeout=timeout, read_timeout=timeout)
    account = _account(settings, settings.endpoint_url)
    return S3Objects(rest, account, options, secret_file=secret if isinstance(secret, FileSecret) else None)


def open_queue(address: str, settings: StoreSettings) -> SqsQueue:
    """Return the queue `address`, a name or a whole address, with credential, region and TLS of the store.

    Sends no request yet. The service is at Amazon's address, or at the one set for AWS tools (`AWS_ENDPOINT_URL_SQS`),
    because the store's `endpoint_url` is that of a store. Raises ConfigError.
    """
    from common.objects.sqs import SqsQueue

    return SqsQueue(address, _account(settings, ""))


def _account(settings: StoreSettings, endpoint_url: str) -> S3Account:
    from common.objects.s3 import S3Account

    key, secret = settings.access_key_id, settings.secret_access_key.get_secret_value()
    verify = False if settings.tls.insecure else settings.tls.ca or None
    return S3Account(key or None, secret or None, settings.region or None, endpoint_url or None, verify)


_probe_lock = threading.Lock()
_probe_results: WeakKeyDictionary[ObjectStore, bool] = WeakKeyDictionary()


def is_verifying(objects: ObjectStore, prefix: str) -> bool:
    """True if the store `verifies_checksums`, tested once for each store; False if the credential may not test it."""
    with _probe_lock:
        if (answer := _probe_results.get(objects)) is None:
            try:
                answer = verifies_checksums(objects, prefix)
                if not answer:
                    log.warning("store checksums unverified", action="checksums_unverified")
            except Refused:
                # A credential that may only read cannot test this, so objects are read back.
                log.info("store checksum test refused", action="checksum_test_refused")
                answer = False
            _probe_results[objects] = answer
        return answer


def verifies_checksums(objects: ObjectStore, prefix: str) -> bool:
    """True if the store refuses bytes with another SHA-256; if not, only a full GET proves a put.

    Puts one object under `prefix`, always the same, and removes it if that is allowed. Raises the errors of
    `ObjectStore.put`.
    """
    key = f"{prefix}wrong-checksum"
    try:
        objects.put(key, b"these bytes", sha256=hashlib.sha256(b"other bytes").hexdigest())
    except ChecksumMismatch:
        return True
    with suppress(FloeError):  # egress may not delete
        objects.delete(key)
    return False
