"""What `floe checkpoint ls` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.chain import Chain
from common.jetstream.client import connect
from common.jetstream.kv import KeyValue, state_key
from common.service.output import print_json, table
from common.settings.root import Settings
from ingress.checkpoint import Gap, Intent, TargetState
from ingress.checkpoints.state import ROLE, StateStore
from ingress.errors import check_targets

CHECKPOINT_COLUMNS = (
    "target",
    "target_sequence",
    "site",
    "feed",
    "incarnation",
    "partition",
    "position",
    "intent",
    "begins",
)
States = Mapping[str, TargetState | None]


async def read_states(settings: Settings) -> States:
    """What is stored of each target, by its name; None where nothing is yet."""
    check_targets(settings.ingress)
    client = await connect(settings.nats_for("ingress"), name="floe checkpoint")
    try:
        bucket = KeyValue.optional(client, settings.ingress.state_bucket)
        states = {}
        for target in settings.ingress.targets:
            store = StateStore(bucket, state_key(ROLE, target.stream), target.stream)
            states[target.stream] = (await store.load()).state
        return states
    finally:
        await client.aclose()


# checkpoint ls


async def print_checkpoints(settings: Settings, as_json: bool) -> None:
    """Print the checkpoint of every target of the configuration."""
    states = await read_states(settings)
    if as_json:
        print_json([checkpoint_json(target, state) for target, state in states.items()])
    else:
        table(_checkpoint_rows(states), CHECKPOINT_COLUMNS)


def checkpoint_json(target: str, state: TargetState | None) -> dict[str, Any]:
    """The checkpoint and the open intent of one target; null where nothing is stored."""
    if state is None:
        return {"target": target, "target_sequence": None, "positions": [], "intent": None}
    checkpoint = state.checkpoint
    positions = [
        {**chain.log_context(), "position": at} for chain, at in sorted(checkpoint.positions.items())
    ]
    return {
        "target": target,
        "target_sequence": checkpoint.target_sequence,
        "target_created": checkpoint.target_created,
        "begins": checkpoint.begins,
        "positions": positions,
        "intent": state.intent and _intent_json(state.intent),
    }


def _intent_json(intent: Intent) -> dict[str, Any]:
    rows = [
        {
            **piece.chain.log_context(),
            "first": piece.rows.first,
            "last": piece.rows.last,
            "count": piece.count,
            "is_gap": isinstance(piece.segment, Gap),
            "left_out": len(piece.left_out),
            "out_of_turn": piece.out_of_turn,
        }
        for piece in intent.pieces
    ]
    return {"base": intent.base, "count": intent.count, "rows": rows}


def _checkpoint_rows(states: States) -> Iterator[dict[str, object]]:
    for target, state in states.items():
        if state is None:
            continue
        intent = _intent_texts(state.intent)
        positions = state.checkpoint.positions
        for chain in sorted({*positions, *intent}):
            yield {
                "target": target,
                "target_sequence": state.checkpoint.target_sequence,
                **chain.log_context(),
                "position": positions.get(chain),
                "intent": intent.get(chain),
                "begins": state.checkpoint.begins or None,
            }


def _intent_texts(intent: Intent | None) -> dict[Chain, str]:
    """What the open intent holds of each chain."""
    found: dict[Chain, list[str]] = {}
    for piece in intent.pieces if intent else ():
        text = f"{piece.rows} given up" if isinstance(piece.segment, Gap) else str(piece.rows)
        found.setdefault(piece.chain, []).append(f"{text} again" if piece.out_of_turn else text)
    return {chain: " ".join(texts) for chain, texts in found.items()}
