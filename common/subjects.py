"""Subject filters and the subjects that they match, by the rules of NATS; patterns of names; and subject transforms.

A transform maps a subject to another one, the same each time, as nats-server does. Tokens of its destination are text,
`$n`, or a function of the tokens that match wildcards of the source:

    {{wildcard(n)}}              the token itself, as `$n`
    {{partition(c,n,…)}}         a number below c, by hash of these tokens; without any: of the whole subject
    {{split(n,text)}}            the token cut at each `text`
    {{splitFromLeft(n,p)}}       the token cut behind p bytes; splitFromRight: before the last p bytes
    {{sliceFromLeft(n,s)}}       the token cut into pieces of s bytes; sliceFromRight: counted from its end
    {{left(n,l)}} {{right(n,l)}} the first, or last, l bytes of the token

`{{random(…)}}` is refused: a message is sent again after an unclear outcome, and must then be the same. A
destination that the server accepts but that can only be a mistake (an index below 1, half a function, an empty
text to split at) is refused too; all others map as on the server. A subject that the source does not match stays
as it is.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest


def matches(filter_subject: str, subject: bytes | str) -> bool:
    """True if `filter_subject` matches the literal `subject`; the empty filter matches all.

    `*` matches one token, a last `>` one or more; elsewhere they are ordinary letters.
    """
    if not filter_subject:
        return True
    subject = subject.encode() if isinstance(subject, str) else subject
    wanted, tokens = filter_subject.encode().split(b"."), subject.split(b".")
    if wanted[-1] == b">":
        wanted = wanted[:-1]
        return len(tokens) > len(wanted) and _tokens_match(wanted, tokens[: len(wanted)])
    return len(tokens) == len(wanted) and _tokens_match(wanted, tokens)


def _tokens_match(wanted: list[bytes], tokens: list[bytes]) -> bool:
    return all(filter_token in (b"*", token) for filter_token, token in zip(wanted, tokens, strict=True))


def name_matches(pattern: str, name: str) -> bool:
    """True if `pattern` matches all of `name`: `*` stands for any text, also none; nothing else is special."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    place, end = len(first), len(name) - len(last)
    if place > end or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in middle:
        if (found := name.find(part, place, end)) < 0:
            return False
        place = found + len(part)
    return True


def any_name_matches(patterns: Iterable[str], name: str) -> bool:
    return any(name_matches(pattern, name) for pattern in patterns)


def common_name(included: Sequence[str], excluded: Sequence[str]) -> str | None:
    """Return a shortest name that all patterns `included` match and none of `excluded`; None if there is none.

    A search through the automaton that reads a name by all patterns at once.
    """
    patterns = (*included, *excluded)
    used = {*"".join(patterns)}
    other = next(each for each in map(chr, range(ord("A"), 0x110000)) if each not in used)  # for all unused letters
    letters = [*sorted(used - {"*"}), other]
    start = tuple(_pattern_places(pattern, {0}) for pattern in patterns)
    found, queue = set[tuple[frozenset[int], ...]](), deque([(start, "")])
    while queue:
        state, name = queue.popleft()
        ends = [len(pattern) in places for pattern, places in zip(patterns, state, strict=True)]
        if name and all(ends[: len(included)]) and not any(ends[len(included) :]):
            return name
        for letter in letters:
            steps = (_pattern_step(*each, letter) for each in zip(patterns, state, strict=True))
            if (below := tuple(steps)) not in found and all(below[: len(included)]):
                found.add(below)
                queue.append((below, name + letter))
    return None


def _pattern_places(pattern: str, places: Iterable[int]) -> frozenset[int]:
    """Return the places, with those behind a `*`, which may stand for nothing."""
    reached = {*places}
    for place in range(min(reached, default=0), len(pattern)):
        if place in reached and pattern[place] == "*":
            reached.add(place + 1)
    return frozenset(reached)


def _pattern_step(pattern: str, places: Iterable[int], letter: str) -> frozenset[int]:
    here = [(place, pattern[place]) for place in places if place < len(pattern)]
    return _pattern_places(pattern, [place + (its != "*") for place, its in here if its in ("*", letter)])


def covers(wide: str, narrow: str) -> bool:
    """True if `wide` matches every subject that `narrow` matches; the empty filter matches all."""
    if not wide or wide == ">":
        return True
    outside, inside = wide.split("."), (narrow or ">").split(".")
    for its, mine in zip(outside, inside, strict=False):
        if its == ">":
            return True
        if mine == ">" or its not in ("*", mine):
            return False
    return len(outside) == len(inside)


def overlaps(left: str, right: str) -> bool:
    """True if some subject matches both filters, by the rules of NATS; the empty filter matches all."""
    if not left or not right:
        return True
    for mine, other in zip_longest(left.split("."), right.split(".")):
        if mine is None or other is None:
            return False  # the shorter one matches no subject with so many tokens
        if ">" in (mine, other):
            return True  # it matches the rest of the other, which has one token at least
        if mine != other and "*" not in (mine, other):
            return False
    return True


def first_overlap(filters: Sequence[str]) -> tuple[str, str] | None:
    return next((pair for pair in combinations(filters, 2) if overlaps(*pair)), None)


# Transforms

Tokens = Sequence[bytes]
TokenMapper = Callable[[Tokens], bytes]

_FUNCTION = re.compile(r"\{\{\s*(\w+)\s*\((.*)\)\s*\}\}", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_INT32 = 2**31 - 1

_NAMES = "wildcard partition split splitFromLeft splitFromRight sliceFromLeft sliceFromRight left right random"
# The server accepts capitals, and first letters, in either case.
_PATTERNS = {n.lower(): re.sub("^.|[A-Z]", lambda c: f"[{c[0].lower()}{c[0].upper()}]", n) for n in _NAMES.split(" ")}


class TransformError(ValueError):
    """A transform that is refused, and why; `side` is `source` or `destination`."""

    def __init__(self, side: str, reason: str) -> None:
        super().__init__(f"{side}: {reason}")
        self.side, self.reason = side, reason


@dataclass(frozen=True, slots=True)
class Transform:
    """One transform. `pattern`: a filter that matches every subject that it makes of matching ones."""

    source: str
    destination: str
    pattern: str
    _parts: tuple[TokenMapper, ...]
    _rest: int | None

    def apply(self, subject: bytes) -> bytes:
        """Map `subject`; return it as it is if it is not literal, or if the source does not match it."""
        tokens = subject.split(b".")
        literal = all(token and token not in (b"*", b">") for token in tokens)
        if not literal or not matches(self.source, subject):
            return subject
        made = [part(tokens) for part in self._parts]
        return b".".join(made if self._rest is None else [*made, *tokens[self._rest :]])


def compile_transform(source: str, destination: str) -> Transform:
    """Compile a transform. Raises TransformError."""
    wanted, given = _tokens("source", source), _tokens("destination", destination)
    if "*" in given:
        raise TransformError("destination", "expected $n or {{wildcard(n)}} in place of *")
    if (wanted[-1] == ">") != (given[-1] == ">"):
        raise TransformError("destination", "expected a final > in both or in neither of source and destination")
    wildcards = [index for index, each in enumerate(wanted) if each == "*"]
    rest = len(wanted) - 1 if wanted[-1] == ">" else None
    whole = not wildcards and rest is None
    texts = given if rest is None else given[:-1]
    made = [_token_mapper(text, wildcards, whole=whole) for text in texts]
    return Transform(source, destination, _pattern(texts, rest), tuple(made), rest)


def _tokens(side: str, subject: str) -> list[str]:
    tokens = subject.split(".")
    if "" in tokens or ">" in tokens[:-1]:
        raise TransformError(side, f"expected a subject without empty tokens, > only last, found {subject!r}")
    for token in tokens:
        is_function = side == "destination" and "{{" in token
        if _CONTROL.search(token) or (" " in token and not is_function):
            raise TransformError(side, f"expected no spaces and control characters, found {subject!r}")
    return tokens


def _pattern(texts: Sequence[str], rest: int | None) -> str:
    known: list[str] = []
    for text in texts:
        if "split" in text.lower() or "slice" in text.lower():
            return ".".join([*known, ">"])
        known.append("*" if "{{" in text or text.startswith("$") else text)
    return ".".join(known if rest is None else [*known, ">"])


# One token of the destination


def _token_mapper(text: str, wildcards: Sequence[int], *, whole: bool) -> TokenMapper:
    if len(text) > 1 and text[0] == "$" and _NUMBER.fullmatch(text[1:]):
        return _wildcard_mapper(_wildcard_index(text, int(text[1:]), wildcards))
    if "{{" not in text and "}}" not in text:
        raw = text.encode()
        return lambda _tokens: raw
    name, arguments = _function(text)
    if name == "partition":
        return _partition(text, arguments, wildcards, whole=whole)
    return _function_mapper(text, name, arguments, wildcards)


def _function(text: str) -> tuple[str, list[str]]:
    found = _FUNCTION.fullmatch(text)
    name = found[1].lower() if found else ""
    if found is None or name not in _PATTERNS or not re.fullmatch(_PATTERNS[name], found[1]):
        known = ", ".join(name for name in _PATTERNS if name != "random")
        raise TransformError("destination", f"expected one of {known}, found {text}")
    if name == "random":
        raise TransformError("destination", f"expected a function that always gives the same result, found {text}")
    return name, re.split(r",\s*", found[2])


def _function_mapper(text: str, name: str, arguments: list[str], wildcards: Sequence[int]) -> TokenMapper:
    expected = 1 if name == "wildcard" else 2
    if len(arguments) != expected or (expected == 1 and not arguments[0]):
        raise TransformError("destination", f"{text}: expected {expected} argument(s), found {len(arguments)}")
    place = _wildcard_index(text, _number(text, arguments[0]), wildcards)
    if name == "wildcard":
        return _wildcard_mapper(place)
    if name == "split":
        return _split(text, arguments[1], place)
    size, cut = _number(text, arguments[1]), _CUTS[name]
    if abs(size) > _MAX_INT32:
        raise TransformError("destination", f"{text}: expected a number up to {_MAX_INT32}, found {size}")
    return lambda tokens: cut(tokens[place], size) if 0 < size < len(tokens[place]) else tokens[place]


def _wildcard_mapper(place: int) -> TokenMapper:
    return lambda tokens: tokens[place]


def _wildcard_index(text: str, number: int, wildcards: Sequence[int]) -> int:
    """Return the index in the source of wildcard `number` (1 is the first)."""
    if not 1 <= number <= len(wildcards):
        found = f"source has {len(wildcards)}" if wildcards else "source has none"
        raise TransformError("destination", f"{text}: expected the number of a * of the source, {found}")
    return wildcards[number - 1]


def _number(text: str, argument: str) -> int:
    if not _NUMBER.fullmatch(argument.strip(" ")):
        raise TransformError("destination", f"{text}: expected a whole number, found {argument!r}")
    return int(argument.strip(" "))


def _partition(text: str, arguments: list[str], wildcards: Sequence[int], *, whole: bool) -> TokenMapper:
    count = _number(text, arguments[0])
    if not 0 <= count <= _MAX_INT32:
        raise TransformError("destination", f"{text}: expected 0 to {_MAX_INT32} partitions, found {count}")
    numbers = [_number(text, argument) for argument in arguments[1:]]
    # Without a wildcard in the source, the server hashes the whole subject, even if tokens are named.
    places = [] if whole else [_wildcard_index(text, number, wildcards) for number in numbers]
    if not places:
        return lambda tokens: _bucket(b".".join(tokens), count)
    return lambda tokens: _bucket(b"".join(tokens[place] for place in places), count)


def _bucket(key: bytes, count: int) -> bytes:
    """Return FNV-1a of 32 bits, modulo `count`, as decimal digits; 0 for no partitions."""
    value = 2166136261
    for byte in key:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return b"%d" % (value % count if count else 0)


def _split(text: str, at: str, place: int) -> TokenMapper:
    if not at or " " in at:
        raise TransformError("destination", f"{text}: expected a separator without spaces, found {at!r}")
    raw = at.encode()
    return lambda tokens: _split_at(tokens[place], raw)


def _split_at(token: bytes, at: bytes) -> bytes:
    """Join the pieces of `token` as the server does: no dot after an empty first piece, none before an empty one."""
    pieces, made = token.split(at), b""
    for index, piece in enumerate(pieces):
        made += piece
        if (following := pieces[index + 1 : index + 2]) and following[0] and (index or piece):
            made += b"."
    return made


def _slices(token: bytes, size: int, first: int) -> bytes:
    ends = [*range(first, len(token), size), len(token)]
    return b".".join(token[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


_CUTS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "splitfromleft": lambda token, size: token[:size] + b"." + token[size:],
    "splitfromright": lambda token, size: token[:-size] + b"." + token[-size:],
    "slicefromleft": lambda token, size: _slices(token, size, size),
    "slicefromright": lambda token, size: _slices(token, size, len(token) % size or size),
    "left": lambda token, size: token[:size],
    "right": lambda token, size: token[-size:],
}
