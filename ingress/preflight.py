"""Checks of a target before anything is published: its existence, its configuration, its limits."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from common.clock import NS_PER_S
from common.errors import ConfigError
from common.exits import nats_command
from common.logs import get_logger
from common.nats.api import StreamInfo, create_stream, ready_stream_info
from common.nats.client import FloeClient
from common.nats.protocol import ApiError
from common.settings.ingress import CreateSettings, IngressSettings, TargetSettings
from common.subjects import overlaps
from ingress.errors import is_transient
from ingress.rows.prepare import SubjectFilters, TargetLimits, patterns_of

log = get_logger(__name__)

# Headers of a source that may take effect at the target, and the setting that the target needs for each.
HEADER_SETTINGS = {b"nats-ttl": "allow_msg_ttl", b"nats-rollup": "allow_rollup_hdrs", b"nats-marker-reason": ""}
# Error codes: the account has reached its resources, or its number of streams.
ACCOUNT_LIMIT_CODES = (10002, 10027)
# The same as options of `nats stream add`.
STREAM_ADD_FLAGS = {"allow_msg_ttl": "--allow-msg-ttl", "allow_rollup_hdrs": "--allow-rollup"}


async def ensure_target(client: FloeClient, settings: TargetSettings) -> StreamInfo:
    """Create the target if it is missing and may be created, and return it. Raises ConfigError with every problem
    found, and Unavailable while it is being restored.
    """
    if (info := await ready_stream_info(client, settings.stream)) is None:
        info = await _create(client, settings)
    refuse_problems(info.config, settings)
    return info


def refuse_problems(config: Mapping[str, Any], settings: TargetSettings) -> None:
    """Raise ConfigError with every problem of the configuration of a target."""
    if found := list(config_problems(config, settings)):
        raise ConfigError(*(f"target {settings.stream}: {problem}" for problem in found), code="E-TARGET")


async def _create(client: FloeClient, settings: TargetSettings) -> StreamInfo:
    target = f"target {settings.stream}"
    if settings.create is None:
        message = f"{target}: expected a stream, found none and no `create`"
        raise ConfigError(message, hint=add_command(settings), code="E-TARGET-MISSING")
    if not settings.subjects_to_create():
        message = f"{target}: create.subjects: expected subjects, found none and no subject_prefix"
        raise ConfigError(message, code="E-TARGET")
    config = stream_config(settings, settings.create)
    refuse_problems(config, settings)  # first: a stream that does not fit the sources would only be in the way
    try:
        info = await create_stream(client, config)
    except ApiError as error:
        if is_transient(error) or error.err_code in ACCOUNT_LIMIT_CODES:
            raise
        raise ConfigError(f"{target}: cannot be created: {error.description}", code="E-TARGET") from error
    log.info("target created", action="target_created", target=settings.stream)
    return info


def control_headers(settings: TargetSettings) -> frozenset[bytes]:
    """Return the names of headers that take effect at the target, in lower case."""
    return frozenset().union(*(source.acting_headers for source in settings.sources))


def stream_config(settings: TargetSettings, create: CreateSettings) -> dict[str, Any]:
    """Return the configuration of a target that Floe creates; no setting of a source is copied."""
    return {
        "name": settings.stream,
        "subjects": list(settings.subjects_to_create()),
        "retention": "limits",
        "discard": "old",
        "storage": create.storage,
        "num_replicas": create.replicas,
        "max_age": int(create.max_age * NS_PER_S),
        "max_bytes": create.max_bytes or -1,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_batched": True,
        **dict.fromkeys(sorted(_needed(settings)), True),
    }


def add_command(settings: TargetSettings) -> str:
    words = [
        nats_command("stream add", settings.stream),
        *_subjects_option(settings),
        "--storage file --replicas 1 --retention limits --discard old",
        "--allow-batch --allow-fast --allow-direct",
        *(STREAM_ADD_FLAGS[need] for need in sorted(_needed(settings))),
        "--defaults",
    ]
    return " ".join(words)


def _subjects_option(settings: TargetSettings) -> list[str]:
    made = [patterns_of(source) for source in settings.sources]
    known = [pattern for patterns in made if patterns is not None for pattern in patterns]
    if not made or None in made:
        return []
    # Unchanged, without those that another one covers: a stream's subjects must not overlap.
    found = sorted(set(known))
    apart = [each for each in found if not SubjectFilters([other for other in found if other != each]).covers(each)]
    return [f"--subjects {shlex.quote(','.join(apart))}"]


def _needed(settings: TargetSettings) -> set[str]:
    return {HEADER_SETTINGS[name] for name in control_headers(settings) if HEADER_SETTINGS.get(name)}


def config_problems(config: Mapping[str, Any], settings: TargetSettings) -> Iterator[str]:
    """Yield each setting of the stream that would break a guarantee, with the expected and the found value."""
    for name in ("mirror", "sources", "subject_transform"):
        if config.get(name):
            yield f"{name}: expected none, found one: it writes messages, or changes subjects"
    for name, reason in (
        ("sealed", "no message can be published"),
        ("no_ack", "no message is acknowledged"),
        ("allow_msg_counter", "only counters are taken"),
        ("discard_new_per_subject", "single messages would be refused for good"),
    ):
        if config.get(name):
            yield f"{name}: expected false, found true: {reason}"
    if config.get("persist_mode") == "async" and not settings.allow_async_persist:
        meaning = "its server acknowledges messages before they are on disk, and loses them if it is killed"
        yield f"persist_mode: expected default, found async: {meaning}; allow_async_persist: true accepts that"
    if config.get("subject_delete_marker_ttl"):
        yield "subject_delete_marker_ttl: expected 0, found more: the server would write messages of its own"
    if settings.create is not None:
        yield from _differences(config, settings, settings.create)
    yield from _control_problems(config, settings)
    yield from _subject_problems(config, settings)


def _differences(config: Mapping[str, Any], settings: TargetSettings, create: CreateSettings) -> Iterator[str]:
    expected = stream_config(settings, create)
    for name in ("retention", "storage"):
        if config.get(name) != expected[name]:
            yield f"{name}: expected {expected[name]} (create), found {config.get(name)}"
    if int(config.get("num_replicas", 1)) < create.replicas:
        yield f"num_replicas: expected {create.replicas} (create), found {config.get('num_replicas', 1)}"
    for name, unlimited in (("max_age", 0), ("max_bytes", -1)):
        found = int(config.get(name, unlimited))
        if found > 0 and (expected[name] <= 0 or found < expected[name]):
            yield f"{name}: expected {expected[name]} (create), found {found}"
    accepting = SubjectFilters(config.get("subjects") or [settings.stream])
    for subject in expected["subjects"]:
        if not accepting.covers(subject):
            yield f"subjects: expected {subject} (create) among them, found {accepting}"


def _control_problems(config: Mapping[str, Any], settings: TargetSettings) -> Iterator[str]:
    for name in sorted(control_headers(settings)):
        if name not in HEADER_SETTINGS:
            known = ", ".join(sorted(known.decode() for known in HEADER_SETTINGS))
            yield f"control_headers: expected some of {known}, found {name.decode()}"
        elif HEADER_SETTINGS[name] and not config.get(HEADER_SETTINGS[name]):
            yield f"{HEADER_SETTINGS[name]}: expected true for control_headers {name.decode()}, found false"
        elif name == b"nats-rollup" and config.get("deny_purge"):
            yield "deny_purge: expected false for control_headers nats-rollup, found true"
    for index, found in _foreign_rollups(settings):
        yield f"sources.{index}.control_headers: {found}"


def _foreign_rollups(settings: TargetSettings) -> Iterator[tuple[int, str]]:
    """Yield each source with rollups that would delete messages of another site, by its number, and the reason."""
    made = [
        (index, site, pattern)
        for index, source in enumerate(settings.sources)
        for site in dict.fromkeys(each.replace("*", text) for each in source.site for text in "ab")  # two of a pattern
        for pattern in patterns_of(source.model_copy(update={"site": (site,)})) or [">"]
    ]
    wanted = {n: source for n, source in enumerate(settings.sources) if b"nats-rollup" in source.acting_headers}
    for index, site, mine in made:
        for _, other, its in made if index in wanted else ():
            if other != site and overlaps(mine, its):
                meant = "expected nats-rollup only if no other site has its subjects, as with {site} in subject_prefix"
                yield index, f"{meant}, found {mine} of {site} and {its} of {other}"
                wanted.pop(index)
                break


def _subject_problems(config: Mapping[str, Any], settings: TargetSettings) -> Iterator[str]:
    accepting = SubjectFilters(config.get("subjects") or [settings.stream])
    for index, made in _unaccepted_subjects(accepting, settings):
        yield f"sources.{index}: expected subjects that the target takes ({accepting}), found {made}"


def _unaccepted_subjects(accepting: SubjectFilters, settings: TargetSettings) -> Iterator[tuple[int, str]]:
    for index, source in enumerate(settings.sources):
        yield from ((index, made) for made in patterns_of(source) or () if not accepting.overlaps(made))


def settings_problems(settings: IngressSettings) -> Iterator[tuple[str, str]]:
    """Yield the key and the reason of each contradiction, for `floe config check`: `create.subjects` that do not accept
    the subjects of a source of the same target, and rollups that reach another site.
    """
    for number, target in enumerate(settings.targets):
        for index, found in _foreign_rollups(target):
            yield f"ingress.targets.{number}.sources.{index}.control_headers", found
        if target.create is not None and target.create.subjects:
            accepting = SubjectFilters(target.create.subjects)
            for index, made in _unaccepted_subjects(accepting, target):
                key = f"ingress.targets.{number}.create.subjects"
                yield key, f"expected subjects that take those of sources.{index} ({made}), found {accepting}"


def limits_from(client: FloeClient, info: StreamInfo, settings: TargetSettings) -> TargetLimits:
    """Return the limits: the subjects, and the smaller of the stream's and its server's largest message."""
    limits = [client.max_payload]
    if (size := int(info.config.get("max_msg_size", -1))) >= 0:
        limits.append(size)
    subjects = info.config.get("subjects") or [settings.stream]
    parks = settings.on_oversize == "park"
    accepting, is_shared = SubjectFilters(subjects), len(settings.source_names) > 1 or bool(settings.patterns)
    return TargetLimits(
        accepting, min(limits), parks, settings.stream, max_payload=client.max_payload, is_shared=is_shared
    )
