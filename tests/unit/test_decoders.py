"""Documents decoded for the first time by several threads at once.

A type that msgspec builds only then crashes the process (SIGSEGV): about once in 200 starts, and in two of five of the
rounds here.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.basics import soak_only

ROOT = Path(__file__).parents[2]

# Each round is a new process, forked after the imports and before the first decoding.
ROUNDS = """
import os, sys, threading
from common.chain import Chain
from common.archive.documents import ChainDocument, ChainStart, StreamDocument, TailDocument
from common.archive.documents import AcceptedGap
from common.sequences import SequenceRange
from egress.incarnations import CLOSING, Closing, EndDecision, End, NextStream
from egress.identity import IDENTITY_RECORD, IdentityRecord
from ingress.chains.sources import FeedStart

def begin(start, works):
    start.wait()
    for work, raw in works:
        work(raw)

tail, at = TailDocument(7).to_json(), "2026-11-20T10:00:00Z"
made = [
    (TailDocument.from_json, tail),
    (ChainDocument.from_json, ChainDocument(("a",), 1, 1).to_json()),
    (StreamDocument.from_json, StreamDocument({}, at, {0: 1}, (ChainStart(("a",), 1),)).to_json()),
    (AcceptedGap.from_json, AcceptedGap(SequenceRange(1, 2), "why", "me", at).to_json()),
    (CLOSING.decode, CLOSING.encode(Closing({0: End(1, 1, at)}, EndDecision(at, {0: 1})))),
    (CLOSING.decode, CLOSING.encode(Closing(next=NextStream(at, {})))),
    (IDENTITY_RECORD.decode, IDENTITY_RECORD.encode(IdentityRecord(at, 1))),
    (FeedStart.from_json, FeedStart(1, 1, {"a": 1}).to_json()),
]
crashed = 0
for number in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        sys.setswitchinterval(1e-6)
        start = threading.Barrier(6)
        threads = [threading.Thread(target=begin, args=(start, made)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    crashed += os.waitpid(pid, 0)[1] != 0
print(crashed)
"""


@pytest.mark.parametrize("rounds", ["12", soak_only("500")])
def test_no_document_ends_a_process_whose_threads_decode_it_first_at_the_same_time(rounds: str) -> None:
    done = subprocess.run([sys.executable, "-c", ROUNDS, rounds], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0", done.stderr
