"""Findings of `floe doctor` and the probes of the store, the disk and the connections.

A probe changes nothing of the archive: it writes only under `_floe/site=…/feed=…/probe/`, and removes the objects that
it may remove. It never raises a FloeError: a failed examination is a finding too.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from common.archive.catalog import configured_feeds
from common.archive.keys import Layout, encode
from common.chain import Chain
from common.clock import Clock
from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.nats.credentials import apply_context
from common.nats.protocol import NO_RESPONDERS_CODE, ApiError
from common.objects.local import existing_parent
from common.objects.open import VIEW_TIMEOUT_S, open_objects
from common.objects.port import BucketStore, ConditionalPutRefused, LifecycleRule, ObjectStore, read_store_clock
from common.service.process import ThreadPool
from common.settings.types import size_words
from common.tasks import cancel

if TYPE_CHECKING:  # they load the NATS client, or build the models of all settings
    from common.nats.client import FloeClient
    from common.settings.root import Settings, StoreSettings
    from common.settings.service import NatsSettings

T = TypeVar("T")

ROLES = ("egress", "ingress", "compaction")

#: Every check, by part, in the order in which they are shown; `docs/reference/doctor.md` has a row for each.
CHECKS: Mapping[str, tuple[str, ...]] = {
    "store": (
        "connection", "list", "write", "read", "delete", "checksum", "conditional put", "concurrent put",
        "list after write", "clock", "lifecycle", "versioning", "layout", "other sites",
    ),
    "nats": (
        "connection", "version", "jetstream", "domain", "rights", "buckets", "max_payload", "stream",
        "durability", "acknowledgements", "target", "batches",
    ),
    "spark": ("java", "pyspark", "python"),
    "disk": ("spool", "space"),
}  # fmt: skip

CONNECT_TIMEOUT_S = 6.0  # even if `connect_timeout` is longer: a frozen server costs half a minute at most
NO_JETSTREAM = ("E-JS-10039", "E-JS-10076")  # not for this account, not on this server
LOOKUP_TIMEOUT_S = 8.0  # seconds for the resolver, if the work that needs it has not ended either; glibc fails after 10
MAX_CLOCK_SKEW_S = 60.0  # seconds between two clocks
CONCURRENT_WRITERS = 8  # that put one key at the same time
MAX_TAILS_LISTED = 1000  # chains that are read for the layout: one request
NO_ETAG = "0" * 32  # an ETag that no object has
# Errors for which a service waits until an operator acts.
NEEDS_OPERATOR_CODES = ("E-S3-CLOCK", "E-STORE-FULL", "E-READ-BACK", "E-S3-TLS", "E-NATS-TLS", "E-STORE-ROOT")


class DoctorState(StrEnum):
    """The result of a check; `skipped`: nothing was found out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one check. `meaning`, `todo`: for people, empty if all is well; a command in `todo` has a line for
    itself. `unreached`: it was skipped because something did not answer.
    """

    part: str
    what: str
    state: DoctorState
    found: str
    meaning: str = ""
    todo: str = ""
    unreached: bool = False

    def __post_init__(self) -> None:
        assert self.what in CHECKS[self.part], "a check is named in the table"


@dataclass(frozen=True, slots=True)
class Examination:
    """The roles that were examined, and all findings."""

    roles: tuple[str, ...]
    findings: tuple[DoctorFinding, ...]

    @property
    def exit_code(self) -> int:
        """The exit code: 3 if a problem was found; 1 if something did not answer; else 0."""
        if any(each.state is DoctorState.PROBLEM for each in self.findings):
            return 3
        return 1 if any(each.unreached for each in self.findings) else 0


def ok(part: str, what: str, found: str) -> DoctorFinding:
    return DoctorFinding(part, what, DoctorState.OK, found)


def warning(part: str, what: str, found: str, meaning: str, todo: str = "") -> DoctorFinding:
    return DoctorFinding(part, what, DoctorState.WARNING, found, meaning, todo)


def problem(part: str, what: str, found: str, meaning: str, todo: str = "") -> DoctorFinding:
    return DoctorFinding(part, what, DoctorState.PROBLEM, found, meaning, todo)


def skipped(part: str, what: str, found: str, meaning: str = "", todo: str = "") -> DoctorFinding:
    return DoctorFinding(part, what, DoctorState.SKIPPED, found, meaning, todo)


def failed(part: str, what: str, error: FloeError, meaning: str = "", todo: str = "") -> DoctorFinding:
    """Return the finding for an error of a probe: without an answer nothing is known, any other error is a problem."""
    found = f"{error.code}: {error.message}"
    todo = "\n".join(filter(None, [error.hint, todo]))
    if error.code in NEEDS_OPERATOR_CODES:
        return problem(part, what, found, "it answers but cannot be used: a service would retry without success", todo)
    if isinstance(error, Unavailable | OutcomeUnknown):
        meaning = "it does not answer, so its state is unknown; a service would wait for it and retry"
        todo = todo or "check the server, and the network path to it"
        return DoctorFinding(part, what, DoctorState.SKIPPED, found, meaning, todo, unreached=True)
    if not meaning and isinstance(error, Refused):
        meaning = "the credential is refused, or lacks a right that the role needs: the role cannot work"
    meaning = meaning or "the configuration does not fit the server or the store: the role cannot work"
    return problem(part, what, found, meaning, todo)


def rights_command(**names: str | None) -> str:
    """Return the command that writes the rights of each role. `names`: as its own; None: the default."""
    given = (f"{name}={value}" for name, value in names.items() if value is not None)
    return shlex.join(["python", "-m", "infra.rights", "rights", *given])


def roles_of(settings: Settings) -> tuple[str, ...]:
    """Return the roles that a configuration is for; compaction if it has neither feeds nor targets."""
    found = [*(["egress"] if settings.egress.feeds_ else []), *(["ingress"] if settings.ingress.targets else [])]
    return tuple(found) or ("compaction",)


# Connections


async def jetstream_account(client: FloeClient) -> dict[str, Any] | None:
    """Return JetStream's information on the account; None if the user may not request it, which no role needs.

    Raises ConfigError if there is none for it, Unavailable and OutcomeUnknown if that is not known.
    """
    from common.nats.api import query

    client.allow_refusal(client.api_subject("INFO"))
    try:
        return await query(client, "INFO")
    except Refused:
        return None
    except (Unavailable, ApiError) as error:
        if error.code not in (NO_RESPONDERS_CODE, *NO_JETSTREAM):
            raise Unavailable(error.message, hint=error.hint, code=error.code) from error
        todo = "enable JetStream for the account, or correct nats.jetstream_domain; to see it:\nnats account info"
        raise ConfigError(f"no JetStream: {error.message}", hint=todo, code=error.code) from error


def cap_timeout(nats: NatsSettings) -> NatsSettings:
    """Return the same connection with a timeout of CONNECT_TIMEOUT_S at most, to check only that it can be made."""
    return nats.model_copy(update={"connect_timeout": min(nats.connect_timeout, CONNECT_TIMEOUT_S)})


async def resolve_servers(nats: NatsSettings) -> NatsSettings:
    """Return the same connection as `cap_timeout`, without servers with names that the resolver does not answer.

    The resolution is not left to `connect`: the end of an event loop waits for its own resolutions, even long ones.
    Raises Unavailable if no server is left, else as `apply_context`.
    """
    nats = cap_timeout(apply_context(nats))
    async with _resolving(*nats.url) as lookups:
        await asyncio.wait(lookups.values(), timeout=nats.connect_timeout)
        if known := tuple(url for url in nats.url if lookups[url].done()):
            return nats.model_copy(update={"url": known})
    raise _unresolved_error("nats.url", nats.url, nats.connect_timeout)


async def run_if_resolved(store: StoreSettings, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises Unavailable if neither that nor an answer of the resolver comes within
    LOOKUP_TIMEOUT_S seconds; a call in a thread continues.
    """
    address = store.endpoint_url or f"https://s3.{store.region}.amazonaws.com"
    is_remote = not store.url.startswith("file:")
    doing = asyncio.ensure_future(work)
    async with _resolving(*([address] if is_remote else [])) as lookups:
        await asyncio.wait([doing], timeout=LOOKUP_TIMEOUT_S if is_remote else None)
        if doing.done() or all(each.done() for each in lookups.values()):
            return await doing
    await cancel(doing)
    raise _unresolved_error("store.endpoint_url", [address], LOOKUP_TIMEOUT_S)


@asynccontextmanager
async def _resolving(*addresses: str) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Yield a task for each address, done once the resolver has answered for its host. Leaves threads behind."""
    threads = ThreadPool("lookup", len(addresses) or 1)

    async def look_up(address: str) -> None:
        host = urlsplit(address).hostname
        with suppress(ValueError):  # an IP address needs no resolver, and a busy host no thread for it
            ip_address(host or "")
            return
        with suppress(OSError, UnicodeError):  # the code that connects reports it
            await threads.run(socket.getaddrinfo, host, None)

    tasks = {address: asyncio.create_task(look_up(address)) for address in addresses}
    try:
        yield tasks
    finally:
        threads.close()
        await cancel(*tasks.values())


def _unresolved_error(key: str, addresses: Sequence[str], seconds: float) -> Unavailable:
    names = ", ".join(str(urlsplit(address).hostname) for address in addresses)
    hint = f"check this host's resolver (/etc/resolv.conf), or set {key} to an IP address"
    return Unavailable(f"{names}: not resolved: no answer from the resolver within {seconds:g} s", hint=hint)


def _open_objects(settings: Settings) -> ObjectStore:
    """Open the store for probes: it answers within a time that a person waits for. A missing folder is not made."""
    timeout = max(VIEW_TIMEOUT_S, cap_timeout(settings.nats).connect_timeout)
    return open_objects(settings.store, timeout=timeout, creates=False)


def _only_site(settings: Settings, roles: Collection[str]) -> str | None:
    """Return the site if only its keys may be listed; None if all may be."""
    return settings.site or None if {*roles} == {"egress"} else None


def _listed_prefixes(settings: Settings, roles: Collection[str]) -> tuple[str, ...]:
    """Return the prefixes that the roles list; a site lists only its own keys."""
    layout, site = Layout(settings.store.prefix), _only_site(settings, roles)
    if not site:
        return (f"{layout.root}site=", f"{layout.root}_floe/")
    own = f"{layout.root}site={encode(site)}/"
    return (own, layout.documents_prefix(site), layout.tails_prefix(site), layout.heartbeats_prefix(site))


# The store


def examine_store(settings: Settings, roles: Collection[str], clock: Clock) -> list[DoctorFinding]:
    """Probe the store; blocking. `roles`: those with the rights to check. Raises as `open_objects`."""
    return list(_StoreProbes(settings, frozenset(roles), clock, _open_objects(settings)).findings())


class _StoreProbes:
    """The checks of one store, one after the other: a later one needs the results of an earlier one."""

    def __init__(self, settings: Settings, roles: frozenset[str], clock: Clock, objects: ObjectStore) -> None:
        self._settings, self._roles, self._clock, self._objects = settings, roles, clock, objects
        self._layout, self._site = Layout(settings.store.prefix), settings.site
        self._chains: list[Chain] | None = None  # of the archive; None: not known
        self._may_write: bool | None = None  # None: not tried
        self._may_delete = self._has_conditions = False
        self._rules: list[LifecycleRule] | None = None  # None: not known

    def findings(self) -> Iterator[DoctorFinding]:
        """Yield findings up to the first check without an answer: the next would only wait, too."""
        yield (connection := self._connection())
        if connection.state is not DoctorState.OK:
            return
        for what, probe in self._probes():
            yield (found := self._run_probe(what, probe))
            if found.unreached:
                return
        self._clean()

    def _probes(self) -> Iterator[tuple[str, Callable[[], DoctorFinding]]]:
        yield "list", self._list
        self._find_chains()
        if (place := self._probe_prefix()) is None:
            yield from _skip_checks(CHECKS["store"][2:10], "no chain is archived or configured")
        else:
            self._key, self._race_key = f"{place}doctor", f"{place}doctor-race"
            yield "write", lambda: self._write(place)
            yield "read", self._read
            if self._may_write:
                yield "delete", self._delete
                yield "checksum", lambda: self._checksum(place)
                yield "conditional put", self._conditional
                yield "concurrent put", self._concurrent
                yield "list after write", lambda: self._list_after_write(place)
                yield "clock", self._clocks
            else:
                yield from _skip_checks(CHECKS["store"][4:10], "not tested without the right to write")
        if isinstance(self._objects, BucketStore):  # a folder is not
            yield "lifecycle", partial(self._lifecycle, self._objects)
            yield "versioning", partial(self._versioning, self._objects)
        yield "layout", self._layout_probe
        if self._may_write and self._roles == {"egress"} and isinstance(self._objects, BucketStore):
            yield "other sites", self._other_sites

    def _run_probe(self, what: str, probe: Callable[[], DoctorFinding]) -> DoctorFinding:
        try:
            return probe()
        except FloeError as error:
            return failed("store", what, error, todo=self._rights() if isinstance(error, Refused) else "")

    def _rights(self) -> str:
        """Return the command that writes the policies of the roles; empty for a folder."""
        (scheme, _, url), feeds = self._settings.store.url.partition("://"), self._settings.egress.feeds
        if scheme == "file":
            return ""
        stream = feeds[0].stream if feeds else None
        return rights_command(site=self._site or None, bucket=url, prefix=self._settings.store.prefix, stream=stream)

    def _connection(self) -> DoctorFinding:
        address = " at ".join(filter(None, [self._settings.store.url, self._settings.store.endpoint_url]))
        try:
            self._objects.list(_listed_prefixes(self._settings, self._roles)[0], limit=1)
        except FloeError as error:
            if error.code != "E-S3-DENIED":  # that is an answer; the other checks report the refusal
                return failed("store", "connection", error)
        return ok("store", "connection", address)

    def _list(self) -> DoctorFinding:
        prefixes = _listed_prefixes(self._settings, self._roles)
        for prefix in prefixes:
            self._objects.list(prefix, limit=1)
        return ok("store", "list", ", ".join(f"{prefix}*" for prefix in prefixes))

    def _find_chains(self) -> None:
        with suppress(FloeError):  # the check `list` reports it
            tails = self._layout.tails_prefix(_only_site(self._settings, self._roles))
            found = self._objects.list(tails, limit=MAX_TAILS_LISTED)
            self._chains = [chain for info in found if (chain := self._layout.parse_tail(info.key))]

    def _probe_prefix(self) -> str | None:
        """Return the prefix for probes: under the first feed of the file, else under an archived chain; else None. The
        feeds of patterns are not known: without a chain of the site, a feed that need not exist is taken.
        """
        pairs = sorted(configured_feeds(self._settings)) or [(chain.site, chain.feed) for chain in self._chains or ()]
        of_patterns = [(self._site, "doctor")] if self._settings.egress.patterns else []
        pairs = [pair for pair in pairs if pair[0] == self._site] or of_patterns or pairs
        return f"{self._layout.documents_prefix(*pairs[0])}probe/" if pairs else None

    # Rights

    def _write(self, place: str) -> DoctorFinding:
        is_needed = self._roles & {"egress", "compaction"}
        try:
            self._objects.put(self._key, b"x")
        except Refused as error:
            self._may_write = False
            meaning = (
                "egress and compaction cannot put segments here; if this bucket is a copy of a site's bucket, "
                "only the site's bucket is written and compacted"
            )
            if is_needed:
                return failed("store", "write", error, meaning, self._rights())
            return skipped("store", "write", "refused; ingress writes only under _floe/ingress/, which is not tested")
        self._may_write = True
        return ok("store", "write", f"{place}*")

    def _read(self) -> DoctorFinding:
        self._objects.get(self._key)
        return ok("store", "read", self._key)

    def _delete(self) -> DoctorFinding:
        try:
            self._objects.delete(self._key)
        except Refused as error:
            if "compaction" not in self._roles:
                return ok("store", "delete", "refused; only compaction and operators need it")
            meaning = "compaction cannot delete the segments that it merged: the archive grows with each run"
            return failed("store", "delete", error, meaning, self._rights())
        self._may_delete = True
        needed = "compaction" in self._roles
        return ok("store", "delete", "allowed" if needed else "allowed; only compaction and operators need it")

    # Behaviour of the store

    def _checksum(self, place: str) -> DoctorFinding:
        from common.objects.open import verifies_checksums

        verifies, body = verifies_checksums(self._objects, place), b"doctor"
        self._objects.put(self._key, body, sha256=hashlib.sha256(body).hexdigest())
        info = self._objects.head(self._key)
        if verifies and info is not None and info.sha256 is not None:
            return ok("store", "checksum", "a wrong SHA-256 is refused, the right one is stored and returned")
        found = "does not return a SHA-256" if verifies else "accepts bytes with a wrong SHA-256"
        meaning = "every segment is read back whole after its put: equally safe, but twice the traffic"
        wanted = "" if self._settings.store.checksum == "sha256" else "set store.checksum: sha256"
        return warning("store", "checksum", found, meaning, wanted or "none needed; or a newer version of the store")

    def _conditional(self) -> DoctorFinding:
        objects, key = self._objects, self._key
        objects.put(key, b"x")
        try:
            ignored = ["If-None-Match"] if objects.put_if_absent(key, b"y") else []
            ignored += ["If-Match"] if objects.put_if_match(key, b"z", NO_ETAG) else []
        except ConditionalPutRefused as error:
            needs = "compaction" in self._roles and self._settings.compaction.retention.is_set
            finding = problem if needs else warning
            return finding("store", "conditional put", error.message, _NO_CONDITIONS_MEANING, _OTHER_STORE)
        if not ignored:
            self._has_conditions = True
            return ok("store", "conditional put", "a condition that does not hold is refused")
        todo = f"set store.conditional_puts: no; {_SAME_NAME_REMEDY}"
        return warning("store", "conditional put", f"ignored: {', '.join(ignored)}", _CONDITIONS_MEANING, todo)

    def _concurrent(self) -> DoctorFinding:
        """Let several writers make one key at once: one may win. Without the right to delete, they replace it."""
        if self._may_delete:
            self._objects.delete(self._race_key)
            etag = None
        else:
            self._objects.put(self._race_key, f"{self._clock.now()}".encode())
            info = self._objects.head(self._race_key)
            etag = info.etag if info else NO_ETAG
        bodies = [f"{self._clock.now()} {number}".encode() for number in range(CONCURRENT_WRITERS)]

        def write(body: bytes) -> bool:
            with suppress(OutcomeUnknown, Unavailable):  # a conflict is no victory
                if etag is None:
                    return self._objects.put_if_absent(self._race_key, body)
                return self._objects.put_if_match(self._race_key, body, etag)
            return False

        with ThreadPoolExecutor(CONCURRENT_WRITERS) as pool:
            try:
                winners = sum(pool.map(write, bodies))
            except ConditionalPutRefused:
                return skipped("store", "concurrent put", "not tested: the store supports no conditions")
        found = f"{winners} of {CONCURRENT_WRITERS} concurrent writers of one key succeeded"
        if winners == 1:
            return ok("store", "concurrent put", found)
        return warning("store", "concurrent put", found, _CONDITIONS_MEANING, _SAME_NAME_REMEDY)

    def _list_after_write(self, place: str) -> DoctorFinding:
        for body in (b"1", b"22"):
            self._objects.put(self._key, body)
            found = [info for info in self._objects.list(place) if info.key == self._key]
            behind = self._objects.list(place, start_after=self._key)
            if [info.size for info in found] != [len(body)] or any(info.key <= self._key for info in behind):
                return problem(
                    "store",
                    "list after write",
                    f"put {len(body)} bytes, listed {[info.size for info in found]}",
                    "a late listing looks like a hole in the archive: egress would count its own segments as missing, "
                    "and chains would stop or wait at the centre",
                    "use a store with consistent listings; remove any cache or mirror in between",
                )
        return ok("store", "list after write", "an object is listed at once, with its new size")

    def _clocks(self) -> DoctorFinding:
        before = self._clock.now()
        theirs = read_store_clock(self._objects, self._key)
        skew = theirs - (before + self._clock.now()) / 2
        if abs(skew) <= MAX_CLOCK_SKEW_S:
            return ok("store", "clock", "within a minute of this host's")
        ahead = "ahead of" if skew > 0 else "behind"
        return warning(
            "store",
            "clock",
            f"{abs(skew):.0f} s {ahead} this host's",
            "ages are counted by the store's clock: `lost_segment_timeout`, `delete_grace`, `min_age`, `silent_after`; "
            "ages shown on this host are wrong by the difference, and S3 refuses requests from 15 minutes on",
            "correct the clock that is wrong; on this host:\ntimedatectl set-ntp true",
        )

    def _clean(self) -> None:
        for key in (self._key, self._race_key) if self._may_delete else ():
            with suppress(FloeError):  # a probe object that stays does no harm
                self._objects.delete(key)

    # The bucket

    def _aws(self, call: str, *more: str) -> str:
        store = self._settings.store
        end = ["--endpoint-url", shlex.quote(store.endpoint_url)] if store.endpoint_url else []
        return " ".join(["aws s3api", call, "--bucket", shlex.quote(store.url.partition("://")[2]), *more, *end])

    def _lifecycle(self, bucket: BucketStore) -> DoctorFinding:
        try:
            rules = self._rules = bucket.lifecycle()
        except (Refused, ConfigError) as error:
            return _unknown_settings("lifecycle", error)
        ours = [rule for rule in rules if prefixes_overlap(rule.prefix, self._layout.root)]
        passing = (self._layout.heartbeats_prefix(), self._layout.audit_prefix())
        ending = [rule for rule in ours if (rule.deletes or rule.archive_class) and not rule.prefix.startswith(passing)]
        if ending:
            rule_texts = "; ".join(_rule_text(rule) for rule in ending)
            return problem(
                "store",
                "lifecycle",
                rule_texts,
                "segments and documents disappear or become unreadable: permanent holes, and chains that stop",
                f"remove these rules from `{self._layout.root or 'the whole bucket'}`; to see them:\n"
                + self._aws("get-bucket-lifecycle-configuration"),
            )
        if "compaction" in self._roles and not any(rule.aborts_uploads for rule in ours):
            return warning(
                "store",
                "lifecycle",
                "no rule for incomplete uploads",
                "incomplete uploads of killed processes stay, cost money, and no listing shows them",
                "add a rule AbortIncompleteMultipartUpload of 7 days; to see the existing rules:\n"
                + self._aws("get-bucket-lifecycle-configuration"),
            )
        return ok("store", "lifecycle", f"{len(rules) or 'no'} rules; none deletes or moves objects that Floe needs")

    def _versioning(self, bucket: BucketStore) -> DoctorFinding:
        try:
            status = bucket.versioning()
        except (Refused, ConfigError) as error:
            return _unknown_settings("versioning", error)
        if status != "Enabled":
            meaning = "objects deleted or overwritten by mistake, or with a stolen key, cannot be recovered"
            todo = "enable it, and add a rule NoncurrentVersionExpiration of about 30 days for old versions:\n"
            todo += self._aws("put-bucket-versioning", "--versioning-configuration Status=Enabled")
            return warning("store", "versioning", status.lower() or "off", meaning, todo)
        if self._rules is None:
            return ok("store", "versioning", "on; unknown if old versions are deleted")
        if any(rule.deletes_versions and self._layout.root.startswith(rule.prefix) for rule in self._rules):
            return ok("store", "versioning", "on; old versions are deleted after a time")
        return ok("store", "versioning", "on; the bucket grows unless a rule NoncurrentVersionExpiration limits it")

    def _other_sites(self) -> DoctorFinding:
        """Put below a name that no site can have, on a condition that cannot hold: only the right is found out."""
        key = f"{self._layout.root}site=-/doctor"
        if not self._has_conditions:
            return skipped("store", "other sites", "not tested: the store ignores conditions")
        try:
            self._objects.put_if_match(key, b"x", NO_ETAG)
        except Refused:
            return ok("store", "other sites", f"a put of {key} is refused")
        meaning = "this credential can write segments of every site, so for the readers of the bucket it is any of them"
        todo = f"none needed in a bucket of one site; else limit it to the keys of its site:\n{self._rights()}"
        return warning("store", "other sites", f"may put {key}", meaning, todo)

    def _layout_probe(self) -> DoctorFinding:
        if self._chains is None:
            return skipped("store", "layout", f"{self._layout.tails_prefix()}* cannot be listed")
        sites = {chain.site for chain in self._chains}
        wanted = {site for target in self._settings.ingress.targets for site, _ in target.feed_sources}
        kind = "one bucket for several sites" if len(sites) > 1 else "one bucket of one site"
        found = f"{kind}: {', '.join(sorted(sites)[:MAX_SITES_SHOWN])}" if sites else "no chain is archived yet"
        if len(sites) > MAX_SITES_SHOWN:
            found += f" and {len(sites) - MAX_SITES_SHOWN} more"
        found += "; this credential may only read, as for a copy" if self._may_write is False else ""
        if "ingress" in self._roles and (missing := sorted(wanted - sites)):
            return warning(
                "store",
                "layout",
                f"{found}; no chain of {', '.join(missing[:MAX_SITES_SHOWN])}",
                "a target waits for sites that have no chain in this bucket: they have not archived yet, use another "
                "name, or write to a bucket of their own that is not copied here",
                "compare `site`, `store.url` and `store.prefix` of the site with this file; a copy must include "
                "`_floe/`",
            )
        return ok("store", "layout", found)


MAX_SITES_SHOWN = 5  # names in a line
_CONDITIONS_MEANING = (
    "conditions are a second line of defence: names contain digests and every put is read back, so segments are safe; "
    "two processes that write one small document at the same time may overwrite each other's changes"
)
_NO_CONDITIONS_MEANING = (
    "segments, captures, snapshots and tombstones have digests in their names: they are put without a condition and "
    "read back; stream.json, chain.json, starts and accepted gaps are claimed in the state bucket of the role before "
    "they are put. Writes without such a claim are refused with E-STORE-CONDITIONS: retention, which raises floors"
)
_OTHER_STORE = "none needed without retention; else use a store that supports conditions"
_SAME_NAME_REMEDY = "never run two sites under one name; use a newer version of the store if there is one"


def _skip_checks(checks: Sequence[str], reason: str) -> Iterator[tuple[str, Callable[[], DoctorFinding]]]:
    return ((what, partial(skipped, "store", what, reason)) for what in checks)


def _unknown_settings(what: str, error: Refused | ConfigError) -> DoctorFinding:
    """Skip a check: the credential may not read, or the store does not offer, the settings of the bucket."""
    hint = error.hint if isinstance(error, Refused) else ""
    return skipped("store", what, f"unknown: {error.code}", "ask the owner of the bucket", hint)


def prefixes_overlap(prefix: str, root: str) -> bool:
    """True if keys under `root` may begin with `prefix`."""
    return prefix.startswith(root) or root.startswith(prefix)


def _rule_text(rule: LifecycleRule) -> str:
    what = "deletes objects" if rule.deletes else f"moves objects to {rule.archive_class}"
    part = ", with some tags or sizes only," if rule.is_partial else ""
    return f"rule {rule.name or 'without a name'} {what} under {rule.prefix or 'every key'!r}{part}"


# The disk


def examine_disk(settings: Settings, roles: Collection[str]) -> list[DoctorFinding]:
    """Probe the disk; blocking. Writes one file of 64 KiB into the spool, and removes it; into the folder above a
    spool that a service has yet to make.
    """
    from common.archive.writer import Spool, spool_errors

    folder = Path(settings.spool_dir or tempfile.gettempdir())
    with closing(Spool(existing_parent(folder))) as spool:
        try:
            path = spool.new_file()
            with spool_errors(folder):
                path.write_bytes(bytes(64 * 1024))
            free = shutil.disk_usage(path.parent).free
        except FloeError as error:
            meaning = "segments are built in this folder: without it egress cannot archive and compaction cannot merge"
            return [problem("disk", "spool", f"{error.code}: {error.message}", meaning, error.hint)]
    feeds = sum(feed.segment.max_size * len(feed.filters()) for feed in settings.egress.feeds)
    merged = max((level.max_size for level in settings.compaction.levels), default=0)
    needed = max(feeds if "egress" in roles else 0, merged if "compaction" in roles else 0)
    found = f"{size_words(free)} free" + (f", {size_words(needed)} needed at most" if needed else "")
    if free >= needed:
        return [ok("disk", "spool", str(folder)), ok("disk", "space", found)]
    meaning = (
        "the spool holds an open segment of each partition, up to `segment.max_size` before compression, or the output "
        "of a merge; a full disk stops them with E-SPOOL until space is free"
    )
    todo = "make room, set `spool_dir` to a larger disk, or lower `segment.max_size` (`max_size` of a level)"
    return [ok("disk", "spool", str(folder)), problem("disk", "space", found, meaning, todo)]
