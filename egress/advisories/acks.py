"""What the answer to a published advisory is worth. Pure."""

from __future__ import annotations

import json

from common.errors import OutcomeUnknown
from common.jetstream.requests import api_answer
from egress.advisories.tally import Result


def judge_ack(subject: str, payload: bytes) -> Result:
    """STORED or DUPLICATE where a stream says so.

    Raises ApiError or Unavailable where it refuses: nothing is stored; OutcomeUnknown for anything else, such
    as the answer of somebody who is no stream.
    """
    ack = api_answer(subject, payload)
    stream, sequence, duplicate = ack.get("stream"), ack.get("seq"), ack.get("duplicate", False)
    is_sequence = isinstance(sequence, int) and not isinstance(sequence, bool) and sequence > 0
    if not stream or not isinstance(stream, str) or not is_sequence or not isinstance(duplicate, bool):
        raise OutcomeUnknown(
            f"answer to {subject}: expected an acknowledgement of a stream, found {json.dumps(ack):.80}"
        )
    return Result.DUPLICATE if duplicate else Result.STORED
