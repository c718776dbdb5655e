"""Our subject transforms, compared with the subjects under which the server stores by its own."""

from __future__ import annotations

import random

import pytest

from common.nats.api import create_stream, query
from common.nats.client import FloeClient, frame
from common.nats.protocol import ApiError
from common.nats.pull import get_message
from common.subjects import TransformError, compile_transform
from tests.support.basics import seeded, soon, unique

pytestmark = pytest.mark.servers

TOKENS = ["a", "b", "x-y-z", "--x--y", "-", "abcdef", "zürich", "0", "$1", "{{a}}", "a*", "long-token-of-many"]
TRANSFORMS = 60
SUBJECTS = 20


class Stream:
    """A stream under one first token, with a transform that is changed again and again."""

    def __init__(self, client: FloeClient) -> None:
        self.client, self.name = client, unique("T")
        self.last = 0
        self.config = {"name": self.name, "subjects": [self.name, f"{self.name}.>"], "storage": "memory"}

    async def open(self) -> Stream:
        await create_stream(self.client, self.config)
        return self

    async def transform(self, source: str, destination: str, key: str = "subject_transform") -> bool:
        """Set the transform; return False if the server refuses it."""
        config = {**self.config, key: {"src": source, "dest": destination}}
        try:
            await query(self.client, f"STREAM.UPDATE.{self.name}", config)
        except ApiError:
            return False
        return True

    async def stored(self, subjects: list[bytes]) -> list[bytes]:
        """Publish a message to each, and return the subjects under which they were stored."""
        for subject in subjects:
            self.client.send(frame(subject, b"x"))
        first, self.last = self.last + 1, self.last + len(subjects)
        await soon(self._is_there)
        return [(await get_message(self.client, self.name, n)).subject for n in range(first, self.last + 1)]

    async def _is_there(self) -> bool:
        return int((await query(self.client, f"STREAM.INFO.{self.name}"))["state"]["last_seq"]) >= self.last


def a_source(rng: random.Random, name: str) -> str:
    tokens = [name] if rng.random() < 0.9 else ["*"]
    tokens += rng.choices(["*", "*", "*", "a", "b"], k=rng.randint(1, 4))
    return ".".join([*tokens, ">"] if rng.random() < 0.3 else tokens)


def a_token(rng: random.Random, wildcards: int) -> str:
    """One token of a destination: mostly good, sometimes out of range."""
    n, m = rng.randint(1, wildcards + (rng.random() < 0.05)), rng.randint(0, 7)
    space = rng.choice(["", " "])
    parts = f"partition({rng.randint(0, 9)},{space}{n})", f"partition({rng.randint(1, 99)})"
    splits = f"split({n},-)", f"Split({n},{space}{rng.choice(['y', '-x', 'de', '--'])})"
    ends = f"splitFromLeft({n},{m})", f"splitFromRight({n},{space}{m})"
    slices = f"SliceFromLeft({n},{m})", f"sliceFromRight({n},{m})", f"partition(7,{n},{rng.randint(1, wildcards)})"
    calls = *parts, *splits, *ends, *slices, f"wildcard({n})", f" Wildcard({n}) "
    return rng.choice(["lit", "$x", f"${n}", *(f"{{{{{call}}}}}" for call in calls)])


def a_subject(rng: random.Random, source: str, name: str) -> bytes:
    tokens = []
    for token in source.split("."):
        keep = token not in ("*", ">") and rng.random() < 0.97
        tokens += [token] if keep else rng.choices(TOKENS, k=rng.randint(1, 3) if token == ">" else 1)
    if rng.random() < 0.1:
        tokens = tokens[:-1] if rng.random() < 0.5 else [*tokens, rng.choice(TOKENS)]
    return ".".join([name, *tokens[1:]]).encode(errors="surrogateescape")


async def test_subjects_become_those_of_the_server(client: FloeClient) -> None:
    rng, stream = seeded(), await Stream(client).open()
    compared = moved = 0
    for _ in range(TRANSFORMS):
        source = a_source(rng, stream.name)
        wildcards = source.split(".").count("*")
        made = [a_token(rng, max(1, wildcards)) for _ in range(rng.randint(1, 4))]
        destination = ".".join([stream.name, *made, *([">"] if source.endswith(">") else [])])
        try:
            ours = compile_transform(source, destination)
        except TransformError:
            assert not await stream.transform(source, destination), (source, destination)
            continue
        assert await stream.transform(source, destination), (source, destination)
        subjects = [a_subject(rng, source, stream.name) for _ in range(SUBJECTS)]
        expected = [ours.apply(subject) for subject in subjects]
        for subject, want, got in zip(subjects, expected, await stream.stored(subjects), strict=True):
            assert got == want, (source, destination, subject)
            compared, moved = compared + 1, moved + (subject != want)
    print(compared, moved)
    assert compared >= 500
    assert moved >= 200


@pytest.mark.parametrize("destination", ["{{left(1,3)}}.{{right(2,2)}}", "{{Left(2, 9)}}", "{{right(1,0)}}.$2"])
async def test_left_and_right_cut_as_the_server_cuts(client: FloeClient, destination: str) -> None:
    """Streams accept these only for republishing."""
    stream = await Stream(client).open()
    source, made = f"{stream.name}.*.*", f"R_{stream.name}.{destination}"
    got: list[bytes] = []
    await client.subscribe_raw(f"R_{stream.name}.>", lambda subject, *_: got.append(subject))
    assert await stream.transform(source, made, "republish")
    subjects = [
        f"{stream.name}.{one}.{other}".encode(errors="surrogateescape") for one in TOKENS for other in TOKENS[:6]
    ]

    await stream.stored(subjects)
    await soon(lambda: len(got) >= len(subjects))

    ours = compile_transform(source, made)
    assert got == [ours.apply(subject) for subject in subjects]


BAD = {  # destinations by source, below the name of the stream
    "*": "$2 {{wildcard(2)}} {{wildcard()}} {{wildcard(1,2)}} {{wildcard(x)}} {{nothing(1)}} * .$1 $1.> "
    "{{partition(x,1)}} {{partition(3,2)}} {{split(1)}} {{splitFromLeft(1)}} {{sliceFromLeft(1,2,3)}}",
    ">": "a $1.>",
    "a": "$1",
    ">.a": "b",
    ".a": "b",
}


async def test_transforms_the_server_refuses_fail(client: FloeClient) -> None:
    stream = await Stream(client).open()
    for source, destinations in BAD.items():
        for destination in destinations.split():
            both = f"{stream.name}.{source}", f"{stream.name}.{destination}"
            assert not await stream.transform(*both), both
            with pytest.raises(TransformError):
                compile_transform(*both)
