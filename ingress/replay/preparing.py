"""Makes rows ready to be published as a replay wants them: only some subjects, perhaps with a mark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from common.chain import Chain
from common.jetstream.headers import REPLAY
from common.settings.ingress import SourceSettings, TargetSettings
from common.subjects import matches
from ingress.chains.roster import Roster
from ingress.replay.request import Request
from ingress.rows.prepare import Prepared, Preparer, Shape
from ingress.rows.subjects import SubjectRule


class ReplayPreparer(Preparer):
    """Prepares the rows that the filters `subjects` take (none: all)."""

    def __init__(
        self, chain: Chain, rule: SubjectRule, shape: Shape, extra: bytes, subjects: tuple[str, ...]
    ):
        super().__init__(chain, rule, shape, extra)
        self._subjects_wanted = subjects

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """As `Preparer.prepare`; nothing where no row is wanted."""
        wanted = matching(batch, self._subjects_wanted)
        return super().prepare(wanted) if wanted.num_rows else Prepared(None)


class ReplayRoster(Roster):
    """Gives out preparers for one request."""

    def __init__(self, settings: TargetSettings, shape: Shape, request: Request) -> None:
        super().__init__(settings, shape)
        self._request = request

    def preparer(self, chain: Chain) -> ReplayPreparer:
        """A new one; used by one thread at a time."""
        request = self._request
        mark = b"%b: %b" % (REPLAY, request.digest.encode()) if request.into_source else b""
        rule = SubjectRule(request.prefix.encode())
        return ReplayPreparer(chain, rule, self.shape, mark, request.subjects)


def target_settings(request: Request) -> TargetSettings:
    """The target of a replay as ingress would have it in its configuration."""
    source = SourceSettings(site=(request.site,), feed=(request.feed,), subject_prefix=request.prefix)
    return TargetSettings(stream=request.target, sources=(source,))


def matching(batch: pa.RecordBatch, subjects: tuple[str, ...]) -> pa.RecordBatch:
    """The rows of `batch` whose subject one of the filters takes; all without filters."""
    if not subjects:
        return batch
    text, raw = batch.column("subject").cast(pa.binary()), batch.column("subject_raw")
    found: Any = text if raw.null_count == len(raw) else pc.coalesce(raw, text)
    kept = [s for s in set(found.to_pylist()) if any(matches(each, s) for each in subjects)]
    mask: Any = pc.is_in(found, value_set=pa.array(kept, pa.binary()))
    return batch.filter(mask)
