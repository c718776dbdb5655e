"""The choices of one seed: the parts of its world, and the parts that are left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.sim.streams import INTEREST, LIMITS, WORK_QUEUE

MESSAGES = 250
TARGET = "CENTRAL"
STATE = f"$KV.FLOE_STATE.ingress.{TARGET}"  # the key of ingress's state of its target
CHANGING = "changing"  # the source is recreated, set back, deleted; an operator acts on the status of egress
SAMPLED = "sampled"  # the feed is sampled, with snapshots
LOST = "lost"  # the source is deleted, and restored from its archive
REPLAYED = "replayed"  # a part of the archive is replayed into another stream meanwhile
ACCOUNT = "account"  # other streams of the account, which a pattern matches, are made, deleted, and made again
HARD = "hard"  # an ordinary store or server with which Floe once failed
HARDSHIPS = ("busy_store", "no_conditions", "small_batches", "bucket_set_back", "full_disks")
#: By the last digit of a seed, the special part of its world beside faults; in seeds ending in 10, 30, … it is ACCOUNT.
#: The others are ordinary.
KINDS = {1: LOST, 3: CHANGING, 5: SAMPLED, 7: CHANGING, 8: REPLAYED, 9: HARD}
#: In seeds ending in 66 `exclusive` is switched; in every other one ending in 4 another site has hostile chains.
SWITCHED, HOSTILE = "switched", "hostile"


@dataclass(frozen=True)
class Cut:
    """The parts left out of the world of a seed: kinds of faults, all faults but those of some numbers, messages.
    `chains`: of the target, about; 0: only those of the first stream.
    """

    without: frozenset[str] = frozenset()
    only: frozenset[int] | None = None
    messages: int = MESSAGES
    chains: int = 0

    @classmethod
    def of(cls, without: str, only: str, messages: int, chains: int = 0) -> Cut:
        """Parse the options of the command."""
        numbers = frozenset(int(each) for each in only.split(",") if each != "none") if only else None
        return cls(frozenset(filter(None, without.split(","))), numbers, messages, chains)

    def __str__(self) -> str:
        """Return it as options of the command."""
        words = [f"--without {','.join(sorted(self.without))}"] if self.without else []
        if self.only is not None:
            words.append(f"--only {','.join(map(str, sorted(self.only))) or 'none'}")
        if self.messages != MESSAGES:
            words.append(f"--messages {self.messages}")
        if self.chains:
            words.append(f"--chains {self.chains}")
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    """The choices of one seed, beside its faults.

    `kind`: of KINDS; `is_quiet`: no other fault occurs; `on_recreated`: as of the feed; `hardship`: of HARDSHIPS, or
    one of the two beside them.
    """

    parts: int
    retention: str
    segment: int
    publisher: str
    is_shared: bool
    centre_begins: float
    compacts: bool
    expires: bool
    source_limit: int
    kind: str = ""
    is_quiet: bool = False
    on_recreated: str = "continue"
    hardship: str = ""
    cut: Cut = field(default_factory=Cut)

    @classmethod
    def of(cls, seed: int, rng: random.Random, more: random.Random, cut: Cut) -> Plan:
        """Draw the choices of a seed. `more`: the source of chance for choices that only some kinds have."""
        retention = rng.choice([LIMITS, LIMITS, INTEREST, WORK_QUEUE])
        kind = ACCOUNT if seed % 20 == 10 else KINDS.get(seed % 10, "")
        hardship = SWITCHED if seed % 100 == 66 else HOSTILE if seed % 20 == 14 else ""
        hardship = HARDSHIPS[seed // 10 % len(HARDSHIPS)] if kind == HARD else hardship
        reads_again = kind in (SAMPLED, LOST) or hardship == "bucket_set_back"
        replays = kind == REPLAYED
        if reads_again:  # other streams drop messages that have to be read again
            retention = LIMITS
        return cls(
            parts=rng.choice([1, 1, 2, 3]),
            retention=retention,
            segment=rng.choice([7, 25, 1000]),
            publisher=rng.choice(["auto", "auto", "atomic", "single"]),
            is_shared=rng.random() < 0.2,
            centre_begins=rng.choice([0.0, 12.0, 30.0]),
            compacts=rng.random() < 0.6,
            # Expired messages cannot be compared with a changed source; retention needs conditions.
            expires=rng.random() < 0.5 and kind not in (CHANGING, LOST, REPLAYED, HARD, ACCOUNT),
            # A replay lacks messages that a limit removed before they were archived, and would ask about them.
            source_limit=rng.choice([0, 0, 0, 60]) if retention == LIMITS and not (reads_again or replays) else 0,
            kind=kind,
            is_quiet=more.random() < 0.25 and kind == CHANGING,
            on_recreated=more.choice(["continue", "halt"]),
            hardship=hardship,
            cut=cut,
        )
