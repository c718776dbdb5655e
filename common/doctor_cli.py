"""`floe doctor`: examines everything that a configuration needs, and explains each result and its remedy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from common.chain import Chain
from common.cli import config_command, print_json, print_table, run_async
from common.clock import SystemClock
from common.doctor import (
    CHECKS,
    ROLES,
    DoctorFinding,
    DoctorState,
    Examination,
    examine_disk,
    examine_store,
    failed,
    jetstream_account,
    ok,
    problem,
    resolve_servers,
    rights_command,
    roles_of,
    run_if_resolved,
    skipped,
    warning,
)
from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.logs import escape
from common.nats.protocol import NO_RESPONDERS_CODE, ApiError
from common.open import load_settings, open_for_view
from common.service.process import ThreadPool
from common.settings.types import StyledCell, format_count

if TYPE_CHECKING:
    from common.nats.api import StreamInfo
    from common.nats.client import FloeClient
    from common.settings.egress import FeedSettings
    from common.settings.root import Role, Settings
    from common.settings.service import ServiceSettings

#: Loaders of functions that only one role has: `target` and `spark` of `floe.PART_FUNCTIONS`.
RoleProbes = Mapping[str, Callable[[], Any]]

FINDING_COLUMNS = ("part", "check", "result", "found")
COLOURS = {
    DoctorState.OK: "green",
    DoctorState.WARNING: "yellow",
    DoctorState.PROBLEM: "red",
    DoctorState.SKIPPED: "dim",
}
OLDEST_TESTED_SERVER = (2, 10)  # the oldest nats-server with which every test of Floe runs
IMPOSSIBLE_REVISION = 2**62  # a revision that no key has
CONSUMER_CALLS = ("CREATE", "INFO", "MSG.NEXT", "DELETE")
ACKS_OF_2_16 = (2, 16)  # its acknowledgement subjects have the domain and the account before the stream
NEARLY_FULL_RATIO = 0.9  # of a limit of the account
PROBE_THREADS = 3  # store, disk, Spark
MAX_MATCHED = 20  # streams of patterns that are examined


@click.command()
@click.option(
    "--role", "roles", type=click.Choice(ROLES), multiple=True, help="Examine for this role; may be repeated."
)
@click.pass_obj
@config_command
def doctor(probes: RoleProbes, roles: tuple[str, ...], config: str, as_json: bool) -> int:
    """Examine the store, NATS, Spark and the disk; explain each result and its remedy.

    Without --role, for the roles of the file: egress if it has feeds, ingress if it has targets, else
    compaction. The archive is not changed. Exit 0: no problems, perhaps warnings; 1: a server or the store
    did not answer; 3: a problem was found. docs/reference/doctor.md lists every check.

    \b
    Example: floe doctor -c site.yaml
             floe doctor -c central.yaml --role compaction
    """
    settings = load_settings(config, quiet=True)
    found = run_async(examine(settings, roles, probes))
    if as_json:
        print_json({"roles": found.roles, "code": found.exit_code, "findings": found.findings})
    else:
        _show(found)
    return found.exit_code


def _show(found: Examination) -> None:
    rows = [(each.part, each.what, StyledCell(each.state, COLOURS[each.state]), each.found) for each in found.findings]
    print_table(rows, FINDING_COLUMNS)
    for each in filter(lambda each: each.meaning, found.findings):
        click.echo(f"\n{each.state}: {each.part}, {each.what}: {escape(each.found)}")
        click.echo(f"  meaning: {each.meaning}")
        if each.todo:
            click.echo("  remedy: " + "\n    ".join(each.todo.split("\n")))


async def examine(settings: Settings, roles: Collection[str], probes: RoleProbes) -> Examination:
    """Examine all parts at the same time: one without an answer delays no other. `roles` empty: as the file has."""
    examined, threads = tuple(roles) or roles_of(settings), ThreadPool("doctor", PROBE_THREADS)
    work: list[Coroutine[Any, Any, list[DoctorFinding]]] = [
        _examine_store(settings, threads.run(examine_store, settings, examined, SystemClock())),
        *(_examine_nats(settings, "egress", probes) for role in examined if role == "egress"),
        *(_examine_nats(settings, "ingress", probes) for role in examined if role == "ingress"),
        threads.run(examine_disk, settings, examined),
    ]
    is_requested = "compaction" in examined
    if settings.compaction.engine == "spark" and (is_requested or not settings.egress.feeds_):
        work.append(threads.run(probes["spark"](), settings, is_requested))
    try:
        found = [each for part in await asyncio.gather(*work) for each in part]
    finally:
        threads.close()
    order = [*CHECKS]
    return Examination(examined, tuple(sorted(found, key=lambda each: order.index(each.part))))


async def _examine_store(settings: Settings, work: Coroutine[Any, Any, list[DoctorFinding]]) -> list[DoctorFinding]:
    try:
        return await run_if_resolved(settings.store, work)
    except FloeError as error:
        return [failed("store", "connection", error)]


# NATS


async def _examine_nats(settings: Settings, role: Role, probes: RoleProbes) -> list[DoctorFinding]:
    from common.nats.client import connect

    nats = settings.nats_for(role)
    try:
        client = await connect(await resolve_servers(nats), name=f"floe doctor ({role})")
    except FloeError as error:
        return [failed("nats", "connection", error)]
    user = f"as {role} to {nats.context or ', '.join(nats.url)}"
    found = [ok("nats", "connection", user)]
    async with aclosing(client), aclosing(_server_findings(client, settings, role, probes)) as findings:
        async for each in findings:
            found.append(each)
            if each.unreached:  # the checks that follow would only wait, too
                break
    return found


async def _server_findings(
    client: FloeClient, settings: Settings, role: Role, probes: RoleProbes
) -> AsyncGenerator[DoctorFinding, None]:
    section = settings.service_of(role)
    yield _version(client)
    account = await _account(client)
    if isinstance(account, DoctorFinding):
        yield account
        if account.state is DoctorState.PROBLEM:
            return
    else:
        yield _limits(account)
        yield _domain(account, section.nats.jetstream_domain)
    matched = await _matched(client, settings) if role == "egress" else []
    yield await _rights(client, settings, role, matched)
    sizes = _stream_size_limits({} if isinstance(account, DoctorFinding) else account)
    yield await _buckets(client, section, sizes)
    if role == "egress":
        yield ok("nats", "max_payload", f"{client.max_payload} bytes at the site")
        for stream in sorted({feed.stream for feed in settings.egress.feeds}):
            async for each in _stream_findings(client, stream):
                yield each
        if matched:
            names = ", ".join(feed.stream for feed in matched)
            yield ok("nats", "stream", f"{format_count(len(matched), 'stream')} of patterns: {names}")
        for feed in matched:
            if feed.retention != ("limits",):
                yield await _acknowledgements(client, feed.stream)
        return
    examine_target = probes["target"]()
    for target in settings.ingress.targets:
        stopped = await asyncio.to_thread(_stopped_chains, settings, target.stream)
        for each in await examine_target(client, target, stopped, sizes[0]):
            yield each


def _stopped_chains(settings: Settings, target: str) -> Mapping[Chain, str]:
    """Return why chains of the target have stopped; empty if unreadable, which the checks of the store report."""
    with suppress(FloeError):
        positions = open_for_view(settings)[1].read_positions(target)
        return positions.stopped if positions else {}
    return {}


def _version(client: FloeClient) -> DoctorFinding:
    found = ".".join(map(str, client.server_version))
    if client.server_version >= OLDEST_TESTED_SERVER:
        return ok("nats", "version", found)
    meaning = "Floe is not tested with servers before 2.10: features that it needs may be missing"
    return warning("nats", "version", found, meaning, "upgrade nats-server to 2.10 or newer; 2.14 has fast batches")


async def _account(client: FloeClient) -> dict[str, Any] | DoctorFinding:
    """Return JetStream's information on the account, or the finding why there is none."""
    try:
        found = await jetstream_account(client)
    except FloeError as error:
        gone = "JetStream is not available to this account, or in this domain or prefix: the role cannot work"
        return failed("nats", "jetstream", error, gone if isinstance(error, ConfigError) else "")
    if found is not None:
        return found
    subject = client.api_subject("INFO")
    return skipped("nats", "jetstream", f"limits are unknown: no permission to request {subject}, which no role needs")


def _limits(account: Mapping[str, Any]) -> DoctorFinding:
    full, texts = list[str](), list[str]()
    for tier, used in [("", account), *(account.get("tiers") or {}).items()]:
        for name in ("storage", "memory", "streams", "consumers"):
            limit, now = int((used.get("limits") or {}).get(f"max_{name}", -1)), int(used.get(name, 0))
            texts.append(f"{tier} {name} {now}".lstrip() + (f" of {limit}" if limit > 0 else ""))
            if limit > 0 and now >= limit * NEARLY_FULL_RATIO:
                full.append(texts[-1])
    if not full:
        return ok("nats", "jetstream", ", ".join(texts))
    meaning = "the account is near its limit: then targets refuse messages, and no bucket or consumer can be made"
    return warning(
        "nats", "jetstream", ", ".join(full), meaning, "raise the limit of the account, or remove unused streams"
    )


def _domain(account: Mapping[str, Any], expected: str) -> DoctorFinding:
    found = str(account.get("domain") or "")
    if expected in ("", found):
        return ok("nats", "domain", found or "none")
    meaning = "another domain answered than the configured one: streams and buckets are made in the wrong place"
    return problem(
        "nats", "domain", f"expected {expected}, found {found or 'none'}", meaning, "correct nats.jetstream_domain"
    )


async def _matched(client: FloeClient, settings: Settings) -> list[FeedSettings]:
    """Return the feeds of the first MAX_MATCHED streams that patterns match; none if the streams cannot be listed.

    The names decide: egress leaves some of them out, such as copies.
    """
    from common.nats.api import stream_names

    if not settings.egress.patterns:
        return []
    client.allow_refusal(client.api_subject("STREAM.NAMES"))
    buckets = {f"KV_{bucket}" for bucket in (settings.egress.state_bucket, settings.egress.lease_bucket)}
    try:
        names = [name for name in await stream_names(client) if name not in buckets]
    except FloeError:  # refused, or without an answer: the next check finds it out
        return []
    found = (feed for name in names for feed in settings.egress.feeds_of(name) if feed.streams)
    return [*islice(found, MAX_MATCHED)]


async def _rights(client: FloeClient, settings: Settings, role: Role, matched: Sequence[FeedSettings]) -> DoctorFinding:
    """Send the requests of the role in a way that changes nothing: requests without a body, which a server rejects only
    after it has authorized them, and a write on a condition that cannot hold.
    """
    from common.nats.kv import KeyValue

    section = settings.service_of(role)
    buckets = (section.state_bucket, section.lease_bucket)
    feeds = [*settings.egress.feeds, *matched] if role == "egress" else []
    targets = settings.ingress.targets if role == "ingress" else ()
    sources = sorted({feed.stream for feed in feeds})
    streams = sources or sorted({target.stream for target in targets})
    calls = [f"STREAM.{call}.{name}" for name in streams for call in ("INFO", "MSG.GET")]
    calls += [f"CONSUMER.{call}.{name}.floe-doctor" for name in sources for call in CONSUMER_CALLS]
    lists = sorted({f"CONSUMER.LIST.{feed.stream}" for feed in feeds if feed.capture_consumers_s})
    calls += lists
    calls += [f"STREAM.{call}.KV_{bucket}" for bucket in buckets for call in ("INFO", "MSG.GET", "CREATE")]
    calls += [f"STREAM.CREATE.{target.stream}" for target in targets if target.create]
    calls += ["STREAM.NAMES"] if role == "egress" and settings.egress.patterns else []
    refused: list[str] = []
    for call in calls:
        client.allow_refusal(client.api_subject(call))
        try:
            await client.api(call, None if call.split(".")[1] in ("INFO", "NAMES") else {})
        except Refused:
            refused.append(client.api_subject(call))
        except ApiError:  # the request was authorized
            pass
        except (Unavailable, OutcomeUnknown) as error:
            if error.code != NO_RESPONDERS_CODE:
                return failed("nats", "rights", error)
    for bucket in buckets:
        client.allow_refusal(f"$KV.{bucket}.doctor", client.api_subject(f"$KV.{bucket}.doctor"))
        try:
            await KeyValue(client, bucket).update("doctor", b"", IMPOSSIBLE_REVISION)
        except Refused:
            refused.append(f"$KV.{bucket}.>")
        except OutcomeUnknown as error:
            return failed("nats", "rights", error)
        except FloeError:  # the bucket does not exist yet, or the request was authorized
            pass
    if not refused:
        return ok("nats", "rights", f"{len(calls) + len(buckets)} requests of {role} were permitted")
    is_warning = set(refused) <= {client.api_subject(call) for call in lists}
    meaning = f"{role} needs them, and stops with E-NATS-PERMISSION"
    names = {"stream" if role == "egress" else "target": name for name in streams[:1]}
    names |= {"state_bucket": section.state_bucket, "lease_bucket": section.lease_bucket}
    command = rights_command(**names, domain=section.nats.jetstream_domain or None)
    todo = f"grant them to the user; to write the files with the rights of each role:\n{command}"
    if is_warning:
        meaning = "consumers are not captured, so a restore of the stream does not restore them; everything else works"
        todo = f"set capture_consumers: never, or {todo}"
    return (warning if is_warning else problem)("nats", "rights", f"refused: {', '.join(refused)}", meaning, todo)


def _stream_size_limits(account: Mapping[str, Any]) -> tuple[bool, int]:
    """Return True if each stream of the account must have `max_bytes`, and the most that it may have, 0: any."""
    from common.nats.api import account_limits

    limits = account_limits(account)
    sizes = [size for each in limits if (size := int(each.get("storage_max_stream_bytes") or 0)) > 0]
    return (any(each.get("max_bytes_required") for each in limits), min(sizes, default=0))


async def _buckets(client: FloeClient, section: ServiceSettings, sizes: tuple[bool, int]) -> DoctorFinding:
    """Find how full the buckets with `max_bytes` are, and how large a missing one is made."""
    from common.nats.api import STREAM_NOT_FOUND, query_or_none

    (are_demanded, allowed), texts, full = sizes, list[str](), list[str]()
    for bucket, size in ((section.state_bucket, section.kv_max_bytes), (section.lease_bucket, section.lease_bytes)):
        try:
            answer = await query_or_none(client, f"STREAM.INFO.KV_{bucket}", STREAM_NOT_FOUND)
        except FloeError as error:
            if isinstance(error, Refused):
                return skipped("nats", "buckets", "refused: see the check `rights`")
            return failed("nats", "buckets", error)
        used, cap = 0, size if are_demanded else 0
        if answer is not None:
            used, cap = int(answer["state"]["bytes"]), int(answer["config"].get("max_bytes") or 0)
        texts.append(f"{bucket}: {used} bytes" + (f" of {cap}" if cap > 0 else ""))
        if answer is None:
            texts[-1] = f"{bucket}: not made yet" + (f", max_bytes {cap}, as the account requires" if cap else "")
            if 0 < allowed < cap:
                meaning = "the account allows no stream of this size: the bucket cannot be created"
                return problem("nats", "buckets", f"{texts[-1]}, but allows {allowed}", meaning, "lower kv_max_bytes")
        elif 0 < cap * NEARLY_FULL_RATIO <= used:
            full.append(f"nats stream edit KV_{bucket} --max-bytes {2 * cap}")
    if not full:
        return ok("nats", "buckets", ", ".join(texts))
    meaning = "a full bucket refuses writes: chains and targets stop with E-KV-FULL"
    return warning("nats", "buckets", ", ".join(texts), meaning, "\n".join(["enlarge it:", *full]))


async def _stream_findings(client: FloeClient, name: str) -> AsyncGenerator[DoctorFinding, None]:
    from common.nats.api import stream_info

    try:
        info = await stream_info(client, name)
    except FloeError as error:
        yield failed("nats", "stream", error)
        return
    if info is None:
        meaning = "egress has no stream to read: the feed waits, or stops with E-SOURCE-GONE if it was archived before"
        do = "create the stream, or correct `stream` of the feed"
        yield warning("nats", "stream", f"{name}: no such stream", meaning, do)
        return
    retention = info.config.get("retention", "limits")
    yield ok("nats", "stream", f"{name}: {info.messages} messages, last {info.last_sequence}, retention {retention}")
    yield _durability(info)
    if retention != "limits":
        yield await _acknowledgements(client, name)


def _durability(info: StreamInfo) -> DoctorFinding:
    """Report the acknowledged messages that the stream's server may lose. A client cannot read `sync_interval`."""
    config, replicas = info.config, int(info.config.get("num_replicas", 1))
    if config.get("persist_mode") == "async":
        meaning = (
            "a killed server loses messages that it acknowledged; those that egress had not read are in no archive"
        )
        do = "unless you accept that, create the stream again without it: no server changes it later"
        return warning("nats", "durability", f"{info.name}: persist_mode async", meaning, do)
    if config.get("storage") == "memory":
        kept = "in memory: a restart of all its servers loses what egress has not read"
    else:
        kept = "a power failure loses the last sync_interval (2 minutes unless set)"
        kept += f" if it hits all {replicas} replicas" if replicas > 1 else ", with one replica"
    return ok("nats", "durability", f"{info.name}: {kept}")


async def _acknowledgements(client: FloeClient, stream: str) -> DoctorFinding:
    """Send acknowledgements to a consumer that does not exist, in both forms of their subjects."""
    refused = list[str]()
    for front in ("$JS.ACK", "$JS.ACK._.floe"):
        client.allow_refusal(subject := f"{front}.{stream}.floe-doctor.1.1.1.1.1")
        try:
            await client.request_raw(subject.encode(), b"", timeout=1.0)
        except Refused:
            refused.append(f"$JS.ACK.{'*.*.' if '_' in front else ''}{stream}.>")
        except FloeError:  # nobody listens there: it was authorized
            pass
    if not refused:
        return ok("nats", "acknowledgements", f"{stream}: permitted in both forms")
    meaning = "egress cannot acknowledge what it archived: it stops with E-NATS-PERMISSION, and the stream keeps all"
    todo = "grant it to the user"
    if len(refused) == 1 and refused[0].startswith("$JS.ACK.*") and client.server_version < ACKS_OF_2_16:
        meaning = f"{meaning}, with nats-server 2.16, or 2.15 with the feature js_ack_fc_v2"
        return warning("nats", "acknowledgements", f"refused: {refused[0]}", meaning, f"{todo} before the upgrade")
    return problem("nats", "acknowledgements", f"refused: {', '.join(refused)}", meaning, todo)
