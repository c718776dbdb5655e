"""A stream of awkward messages: the same again for the same random source.

Beside the messages themselves (`infra/awkward_kinds.py`): the same message id far apart, sequences deleted
after they were stored, and few subjects over and over, so that a limit per subject leaves holes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.clock import Clock, SystemClock
from common.errors import ConfigError
from common.jetstream.api import get_message, stream_info
from common.jetstream.client import ApiError, FloeClient
from infra.acked import AckedPublisher, Published
from infra.awkward_kinds import KINDS, NEEDS, RARE, Awkward, Context, unchecked_frame

ROUNDS_BETWEEN_RARE = 8
DELETED_SHARE = 0.03
LONGEST_PAUSE = 2.0  # seconds; a stream's duplicate window up to this is waited out once


@dataclass(frozen=True, slots=True)
class AwkwardReport:
    """What became of the messages; `stored`: how many of each kind; `deleted`: sequences removed again."""

    published: Published
    stored: Counter[str]
    deleted: tuple[int, ...]


def awkward_messages(
    rng: random.Random, *, root: str, stream: str, count: int, max_payload: int, config: Mapping[str, Any]
) -> Iterator[Awkward]:
    """`count` messages below the subject `root`: all kinds that a stream with `config` stores, shuffled."""
    kinds = [name for name in KINDS if name not in NEEDS or config.get(NEEDS[name])]
    number = turn = 0
    while number < count:
        names = [name for name in kinds if name not in RARE or turn % ROUNDS_BETWEEN_RARE == 0]
        for name in rng.sample(names, len(names))[: count - number]:
            yield KINDS[name](Context(root.encode(), stream.encode(), number, max_payload, rng))
            number += 1
        turn += 1


async def publish_awkward(
    client: FloeClient,
    stream: str,
    subject_root: str,
    rng: random.Random,
    count: int,
    *,
    deleted_share: float = DELETED_SHARE,
    largest: int | None = None,
    clock: Clock | None = None,
) -> AwkwardReport:
    """Publish `count` awkward messages into `stream` and delete some of them again.

    The stream must take `{subject_root}.>`. `largest`: bytes of the largest messages, headers included; by
    default what the server takes at most, and then the server of a target must take more. Raises ConfigError
    where the stream does not exist.
    """
    config = await _config(client, stream)
    made = awkward_messages(
        rng,
        root=subject_root,
        stream=stream,
        count=count,
        max_payload=largest or client.max_payload,
        config=config,
    )
    kinds: list[str] = []
    sequences: dict[int, int] = {}
    async with AckedPublisher(client, window=256, on_stored=sequences.__setitem__) as publisher:
        for message in made:
            if len(kinds) == count // 2:
                await _outlast_duplicate_window(publisher, config, clock or SystemClock())
            kinds.append(message.kind)
            await publisher.publish(message.subject, message.payload, message.headers, make=unchecked_frame)
        published = await publisher.settle()
    deleted = await _delete_some(client, stream, sorted(sequences.values()), rng, deleted_share)
    return AwkwardReport(published, Counter(kinds[number] for number in sequences), deleted)


async def _config(client: FloeClient, stream: str) -> dict[str, Any]:
    info = await stream_info(client, stream)
    if info is None:
        raise ConfigError(f"stream {stream}: expected to exist, found none")
    return info.config


async def _outlast_duplicate_window(
    publisher: AckedPublisher, config: Mapping[str, Any], clock: Clock
) -> None:
    """Let the second half's repeated message ids be stored, where the window is short enough to wait for."""
    window = config.get("duplicate_window", 0) / 1e9
    if window <= LONGEST_PAUSE:
        await publisher.settle()
        await clock.sleep(window * 2.5)  # the server forgets ids only once in a window


async def _delete_some(
    client: FloeClient, stream: str, sequences: list[int], rng: random.Random, share: float
) -> tuple[int, ...]:
    """As many as that share of `sequences`, where the stream still holds so many of them."""
    wanted, deleted = int(len(sequences) * share), list[int]()
    for sequence in rng.sample(sequences, len(sequences)):
        if len(deleted) == wanted:
            break
        if await _delete(client, stream, sequence):
            deleted.append(sequence)
    return tuple(sorted(deleted))


async def _delete(client: FloeClient, stream: str, sequence: int) -> bool:
    """Delete one message; False where a limit or a rollup was faster."""
    try:
        await client.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except ApiError as error:
        # The server's number for it depends on where the message stood and on the kind of its store.
        if await get_message(client, stream, sequence) is not None:
            raise error from None
        return False
    return True
