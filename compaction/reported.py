"""Which problems an earlier run has told already, so that cron hears of each of them once.

    {prefix}/_floe/tombstones/reported/site=…/…/partition={n}/{sha256[:16]}.json

A small object for each problem with data of a chain, written when it is first told. It is removed when a run
over that chain does not meet the problem any more and an object that it names is gone: a damaged segment that
only waits for its neighbours is not told twice. Losing one, or two runs at once, tells a problem again and
does nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from common.chain import Chain
from common.errors import DataError
from common.objects.port import ObjectStore
from common.segments.keys import Layout
from compaction.failures import Failure

MAX_BYTES = 64 * 1024  # of one note


class Reported:
    """What was told of the chains of one store."""

    def __init__(self, objects: ObjectStore, layout: Layout) -> None:
        self._objects, self._layout = objects, layout

    def told(self, failures: Iterable[Failure]) -> list[Failure]:
        """Those of `failures` that an earlier run has told."""
        known = self._listed()
        return [failure for failure in failures if self._key(failure) in known]

    def remember(self, chains: Sequence[Chain], failures: Iterable[Failure]) -> None:
        """`failures` are all that is wrong with `chains` now: write down what is new, remove what is over."""
        known = self._listed()
        found = {key: failure for failure in failures if (key := self._key(failure))}
        for key, failure in found.items():
            if key not in known:
                body = {"what": failure.what, "error": failure.line, "objects": failure.suspects}
                self._objects.put(key, json.dumps(body, sort_keys=True).encode())
        looked_at = tuple(map(self._layout.reported_prefix, chains))
        for key in sorted(known - found.keys()):
            if key.startswith(looked_at) and self._is_over(key):
                self._objects.delete(key)

    def _is_over(self, key: str) -> bool:
        """Whether an object is gone that the note at `key` names, or it names none."""
        raw = self._objects.get(key, length=MAX_BYTES) or b""
        try:
            named = json.loads(raw)["objects"]
            return not named or any(self._objects.head(str(each)) is None for each in named)
        except (ValueError, KeyError, TypeError, RecursionError):
            return True

    def _listed(self) -> set[str]:
        return {info.key for info in self._objects.list(self._layout.reported_prefix())}

    def _key(self, failure: Failure) -> str:
        """Where the failure is noted; empty for one that is not about the data of one chain."""
        if failure.chain is None or failure.exit_code != DataError.exit_code:
            return ""
        digest = hashlib.sha256(failure.line.encode()).hexdigest()[:16]
        return f"{self._layout.reported_prefix(failure.chain)}{digest}.json"
