"""Names and configurations of the durables that egress uses on interest streams and work queues.

Egress creates one for each of its sessions. `floe restore` creates one at the sequence that egress will read next,
because an interest stream keeps nothing for a consumer that does not exist yet.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Any

from common.clock import NS_PER_S

LIMITS, INTEREST, WORK_QUEUE = "limits", "interest", "workqueue"
# Seconds. A message that is delivered again while it is still being read resets the reader, so this exceeds the
# longest time that a message may wait for its segment, a lease and an upload together.
ACK_WAIT_S = 7 * 86_400.0
# The first server version to get ack policy `all`; 2.10.26, 2.11.11 and 2.12.8 cannot use it.
ACK_ALL_MIN_VERSION = (2, 15, 0)
DESCRIPTION = "Floe egress; replaced by each of its sessions"
SUFFIX_BYTES = 4  # bytes at the end of a name

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def durable_name_prefix(site: str, feed: str, partition: int) -> str:
    """Return the prefix of the names of a partition's durables; a random suffix follows.

    The prefix is a legal name and unique: the hashes distinguish sites and feeds with the same joined names (`A_1` and
    `B`, `A` and `1_B`).
    """
    mark = name_hash(site) + name_hash(f"{site}/{feed}/{partition}")
    return f"floe_{site}_{_UNSAFE.sub('-', feed)[:100]}_{partition}_{mark}"


def name_hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def durable_config(
    name: str,
    retention: str,
    first_sequence: int,
    filter_subject: str,
    version: tuple[int, int, int],
    description: str = DESCRIPTION,
) -> dict[str, Any]:
    """Return the configuration of a consumer that outlives its reader, with storage and replicas like the stream's.

    `name`: without the random suffix. `first_sequence`: used on an interest stream only. `version`: the server's. Older
    servers keep the messages before the first sequence for a durable that acknowledges all up to a message: they assume
    that it still wants them. So there each message is acknowledged explicitly.
    """
    if retention == INTEREST:
        policy = "all" if version >= ACK_ALL_MIN_VERSION else "explicit"
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": first_sequence, "ack_policy": policy}
    else:
        start = {"deliver_policy": "all", "ack_policy": "explicit"}
    return {
        "durable_name": f"{name}_{secrets.token_hex(SUFFIX_BYTES)}",
        "description": description,
        "ack_wait": int(ACK_WAIT_S * NS_PER_S),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "replay_policy": "instant",
        **start,
        **({"filter_subject": filter_subject} if filter_subject else {}),
    }
