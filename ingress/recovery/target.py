"""The target of a replay: its stream, checked, and created if it was lost; and the receipt of the replay into it.

A receipt holds the request of a replay, the ranges that it covers, the state of the target, and its end. All of it is
stored under one key of the state bucket. The state of the target has the form that ingress uses, so the same
compare-and-set steps store it; the receipt is an envelope around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.archive.documents import StreamDocument
from common.chain import Chain
from common.errors import ConfigError, FloeError, Stopped
from common.exits import checkpoint_command, choices
from common.logs import get_logger
from common.nats.api import StreamInfo, create_stream, stream_info
from common.nats.client import FloeClient
from common.nats.kv import KeyValue, state_key
from common.nats.protocol import ApiError
from common.sequences import SequenceRange
from common.settings.types import format_size
from ingress.checkpoint import STATE_ROLE, StateCodec, TargetState, from_json
from ingress.preflight import add_command, refuse_problems
from ingress.recovery.ranges import ChainRange, ReplayPlan
from ingress.recovery.request import ReplayHints, ReplayRequest
from ingress.recovery.retention_filter import limit_of
from ingress.recovery.source import target_settings

log = get_logger(__name__)

# Keys of a stream that is made again. Other keys would write to or read from other streams, change subjects, or refuse
# messages that were stored once: mirror, sources, subject_transform, republish, sealed, no_ack, …
RECREATED_KEYS = (
    "description", "subjects", "retention", "storage", "num_replicas", "max_age", "max_bytes", "max_msgs",
    "max_msgs_per_subject", "max_msg_size", "max_consumers", "discard", "duplicate_window", "compression",
    "placement", "consumer_limits", "allow_rollup_hdrs", "allow_msg_ttl", "deny_delete", "deny_purge",
)  # fmt: skip
SUBJECTS_OVERLAP = 10065  # error: another stream has some of the subjects
# Keys that are not settings of a user.
_SERVER_KEYS = ("name", "metadata", "first_seq", "allow_direct", "allow_atomic", "allow_batched", "mirror_direct")


@dataclass(frozen=True, slots=True)
class StreamTemplate:
    """The configuration of a missing target. `left_out`: settings of the lost stream that it does not get."""

    config: dict[str, Any]
    left_out: tuple[str, ...] = ()


def template(request: ReplayRequest, document: StreamDocument | None) -> StreamTemplate:
    """Return the configuration of the frozen stream, under the target's name. Raises ConfigError without a document."""
    if document is None:
        raise ConfigError(
            f"target {request.target}: expected stream.json of {request.site}/{request.feed}, found none",
            hint=choices(("create it by hand", add_command(target_settings(request)))),
            code="E-TARGET-MISSING",
        )
    source = document.config
    config = {name: source[name] for name in RECREATED_KEYS if name in source}
    if request.prefix:
        config["subjects"] = [f"{request.prefix}.>"]
    elif not config.get("subjects"):
        config["subjects"] = [str(source.get("name", request.feed))]
    config |= {"name": request.target, "allow_direct": True, "allow_atomic": True, "allow_batched": True}
    unset: tuple[object, ...] = (None, "", False, 0, -1, [], {})
    left_out = [n for n, value in source.items() if n not in (*RECREATED_KEYS, *_SERVER_KEYS) and value not in unset]
    return StreamTemplate(config, tuple(sorted(left_out)))


async def create_target(client: FloeClient, template: StreamTemplate, hints: ReplayHints) -> StreamInfo:
    """Create the target. Raises ConfigError if the server refuses."""
    name = template.config["name"]
    try:
        info = await create_stream(client, template.config)
    except ApiError as error:
        raise ConfigError(
            f"target {name}: cannot be created: {error.description}",
            hint=hints.not_created_hint(is_taken=error.err_code == SUBJECTS_OVERLAP),
            code="E-TARGET",
        ) from error
    log.info("target created", action="target_created", target=name)
    return info


async def read_target(client: FloeClient, request: ReplayRequest) -> StreamInfo | None:
    """Return the target, None if it is missing. Raises ConfigError if its configuration is unsuitable."""
    info = await stream_info(client, request.target)
    if info is not None:
        refuse_problems(info.config, target_settings(request))
    return info


def missing_error(hints: ReplayHints) -> FloeError:
    request = hints.request
    return ConfigError(
        f"target {request.target}: expected a stream, found none",
        hint=choices(
            ("create it by hand", add_command(target_settings(request))),
            ("or from stream.json", hints.command("--create")),
        ),
        code="E-TARGET-MISSING",
    )


def not_empty_error(hints: ReplayHints, info: StreamInfo, document: StreamDocument | None) -> FloeError:
    ways = [("append after its messages", hints.command("--append"))]
    if document is None or document.config.get("name") != hints.request.target:  # the source may hold unarchived ones
        ways.append(("or empty it, and run the same command again", hints.purge_command))
    return Stopped(
        f"target {hints.request.target}: expected an empty stream, found {info.messages} messages up to "
        f"sequence {info.last_sequence}",
        hint=choices(*ways),
        code="E-TARGET-NOT-EMPTY",
    )


def check_source(hints: ReplayHints, document: StreamDocument | None) -> None:
    """Raise ConfigError if the target should be the source of the feed and is not."""
    name = None if document is None else document.config.get("name")
    request = hints.request
    if request.into_source and name != request.target:
        text = f"--into-source: expected the target {name} as in stream.json, found {request.target}"
        raise ConfigError(text, hint=hints.source_hint(str(name or "")), code="E-REPLAY-SOURCE")


async def check_ingress(client: FloeClient, state_bucket: str, target: str) -> None:
    """Raise Stopped if ingress has a state of the target: it would stop at the messages of a replay."""
    if await KeyValue(client, state_bucket, optional=True).get(state_key(STATE_ROLE, target)) is not None:
        elsewhere = "replay into another stream; or empty this one, and let ingress fill it again"
        text = f"target {target}: ingress delivers into it, and messages of a replay would be foreign to it"
        raise Stopped(text, hint=choices((elsewhere, checkpoint_command(target, "--forget"))), code="E-REPLAY-INGRESS")


def target_notes(
    config: Mapping[str, Any], plan: ReplayPlan, request: ReplayRequest, document: StreamDocument | None
) -> Iterator[str]:
    name = request.target
    keeps = {"interest": "drops messages that no consumer needs", "workqueue": "keeps messages until they are consumed"}
    if what := keeps.get(config.get("retention", "")):
        yield f"target {name}: retention {config['retention']} {what}: create its consumers first"
    for limit, needed, text in (("max_msgs", plan.rows, str), ("max_bytes", plan.raw_bytes, format_size)):
        if 0 < (found := limit_of(config, limit)) < needed:
            short = f"{limit} {text(found)} is less than the {text(needed)} to come"
            yield f"target {name}: {short}: it drops the oldest"
    if per_subject := limit_of(config, "max_msgs_per_subject"):
        yield f"target {name}: it keeps the last {per_subject} messages of each subject"
    if not request.into_source and document is not None and document.config.get("name") == name:
        yield f"target {name} has the name of the feed's source: if it is that, add --into-source"


# The receipt

REPLAY_ROLE = "replay"
RECEIPT_VERSION = 1


def receipt_key(target: str) -> str:
    return state_key(REPLAY_ROLE, target)


@dataclass(frozen=True, slots=True)
class Receipt:
    """One replay. `ranges`: the ranges of the request at its start. `base`: the target's last sequence then.

    `rows`: how many messages; an upper bound unless `is_exact`. `begun`, `finished`: seconds since 1970; 0 for not
    finished. `skips_holes`: the operator allowed it.
    """

    request: ReplayRequest
    ranges: tuple[ChainRange, ...]
    base: int
    rows: int
    is_exact: bool
    begun: float
    finished: float = 0.0
    skips_holes: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "request": self.request.to_json(),
            "ranges": [[str(each.chain), each.rows.first, each.rows.last] for each in self.ranges],
            "base": self.base,
            "rows": self.rows,
            "exact": self.is_exact,
            "begun": self.begun,
            "finished": self.finished,
            "skips_holes": self.skips_holes,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Receipt:
        """Parse a receipt. Raises ValueError, KeyError, TypeError, FloeError."""
        request = ReplayRequest.from_json(document["request"])
        ranges = [
            ChainRange(Chain.parse(chain), SequenceRange(int(first), int(last)))
            for chain, first, last in document["ranges"]
        ]
        base, rows, is_exact = int(document["base"]), int(document["rows"]), bool(document["exact"])
        begun, finished = float(document["begun"]), float(document["finished"])
        return cls(request, tuple(ranges), base, rows, is_exact, begun, finished, bool(document["skips_holes"]))


@dataclass(frozen=True, slots=True)
class StoredReplay:
    """A stored replay: the receipt, the target's state, and the revision of the key."""

    receipt: Receipt
    state: TargetState
    revision: int


@dataclass(frozen=True, slots=True)
class UnreadableReplay:
    """A stored value that this version of Floe did not write: the reason, and the revision of the key."""

    reason: str
    revision: int


async def load_replay(bucket: KeyValue, target: str) -> StoredReplay | UnreadableReplay | None:
    """Return the last replay into `target`; None if there was none. Raises Unavailable."""
    if (entry := await bucket.get(receipt_key(target))) is None:
        return None
    try:
        receipt, inner = _parse(entry.value)
        return StoredReplay(receipt, from_json(target, inner), entry.revision)
    except (ValueError, Stopped) as error:
        return UnreadableReplay(str(error), entry.revision)


def unreadable_replay_error(hints: ReplayHints, reason: str) -> Stopped:
    return Stopped(
        f"stored state of the replay into {hints.request.target} cannot be read: {reason}",
        hint=hints.restart_hint(),
        code="E-STATE-KV",
    )


def other_replay_error(hints: ReplayHints, receipt: Receipt) -> Stopped:
    request, found = hints.request, receipt.request
    return Stopped(
        f"target {request.target}: another replay into it is not finished: expected {request.arguments()}, "
        f"found {found.arguments()}",
        hint=choices(("finish that one", ReplayHints(found).command()), hints.restart_hint("or ")),
        code="E-REPLAY-OTHER",
    )


class ReceiptCodec:
    """The stored form of the state of a target with `receipt` around it, for `ingress.checkpoint.StateStore`."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt, self._states = receipt, StateCodec(receipt.request.target)

    def encode(self, state: TargetState) -> bytes:
        head = json.dumps(self.receipt.to_json(), separators=(",", ":")).encode()
        return b'{"version":%d,"replay":%b,"state":%b}' % (RECEIPT_VERSION, head, self._states.encode(state))

    def decode(self, raw: bytes) -> TargetState:
        """Return the state alone. Raises Stopped if the receipt around it is unreadable, or of another replay."""
        hints = ReplayHints(self.receipt.request)
        try:
            receipt, inner = _parse(raw)
        except ValueError as error:
            raise unreadable_replay_error(hints, str(error)) from error
        if receipt.request.digest != hints.request.digest:
            raise other_replay_error(hints, receipt)
        return self._states.decode(inner)


def _parse(raw: bytes) -> tuple[Receipt, bytes]:
    """Return the receipt, and the state within. Raises ValueError."""
    try:
        document = json.loads(raw)
        if document["version"] != RECEIPT_VERSION:
            raise ValueError(f"version: expected {RECEIPT_VERSION}, found {document['version']!r:.40}")
        receipt = Receipt.from_json(document["replay"])
        return receipt, json.dumps(document["state"], separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FloeError) as error:
        raise ValueError(f"{error} (begins {raw[:40]!r})") from error
