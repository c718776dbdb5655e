"""From the settings of the store to the store."""

import hashlib
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from common.errors import FloeError, Refused
from common.objects.local import LocalObjects
from common.objects.port import ChecksumMismatch, ObjectStore
from common.objects.s3 import S3Account, S3Objects, S3Options
from common.objects.sqs import SqsQueue
from common.service.logs import get_logger
from common.settings.root import StoreSettings
from common.settings.types import FileSecret

log = get_logger("objects.probe")


def open_objects(settings: StoreSettings) -> ObjectStore:
    """The object store that `settings` names. An S3 store is not asked anything yet.

    Raises ConfigError for an address that is none, and for a `file://` store what LocalObjects raises.
    """
    scheme, _, rest = settings.url.partition("://")
    secret = settings.secret_access_key
    if scheme == "file":
        return LocalObjects(Path(unquote(rest)))
    return S3Objects(
        rest,
        endpoint_url=settings.endpoint_url or None,
        region=settings.region or None,
        access_key_id=settings.access_key_id or None,
        secret_access_key=secret.get_secret_value() or None,
        options=_options(settings),
        secret_file=secret if isinstance(secret, FileSecret) else None,
    )


def open_queue(address: str, settings: StoreSettings) -> SqsQueue:
    """The queue `address`, a name or a whole address, with credential, region and TLS of the store.

    It is not asked anything yet. Where it is reached: Amazon's address, or what AWS tools are told
    (`AWS_ENDPOINT_URL_SQS`): the store's `endpoint_url` is a store. Raises ConfigError.
    """
    secret, verify = settings.secret_access_key.get_secret_value(), _options(settings).verification()
    account = S3Account(settings.access_key_id or None, secret or None, settings.region or None, None, verify)
    return SqsQueue(address, account)


def _options(settings: StoreSettings) -> S3Options:
    return S3Options(
        addressing_style=settings.addressing_style,
        checksum=settings.checksum,
        storage_class=settings.storage_class,
        encryption=settings.encryption.mode,
        kms_key_id=settings.encryption.kms_key_id,
        ca=Path(settings.tls.ca) if settings.tls.ca else None,
        insecure=settings.tls.insecure,
    )


PROBE_PREFIX = "_floe/probe/"


_guard = threading.Lock()
_answers: WeakKeyDictionary[ObjectStore, bool] = WeakKeyDictionary()


def is_verifying(objects: ObjectStore, prefix: str = PROBE_PREFIX) -> bool:
    """`verifies_checksums`, asked once for each `objects`; False where the credential may not try it."""
    with _guard:
        if (answer := _answers.get(objects)) is None:
            try:
                answer = verifies_checksums(objects, prefix)
                if not answer:
                    log.warning("store takes wrong checksums: reading back whole", action="read_back_whole")
            except Refused:
                # Who may only read finds out by reading.
                log.info("no right to try the store: reading back whole", action="read_back_whole")
                answer = False
            _answers[objects] = answer
        return answer


def verifies_checksums(objects: ObjectStore, prefix: str = PROBE_PREFIX) -> bool:
    """Whether the store refuses bytes that their SHA-256 denies; if not, only a full GET proves a put.

    Puts one object under `prefix`, always the same, and removes it where that is allowed. Raises what
    `ObjectStore.put` raises.
    """
    key = f"{prefix}wrong-checksum"
    try:
        objects.put(key, b"these bytes", sha256=hashlib.sha256(b"other bytes").hexdigest())
    except ChecksumMismatch:
        return True
    with suppress(FloeError):  # egress may not delete
        objects.delete(key)
    return False
