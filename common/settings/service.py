"""What egress and ingress have in common as services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from common.settings.base import Section, option
from common.settings.nats import NatsSettings
from common.settings.types import BucketName, Duration, Range, Required, Size, Whole


class ServiceSettings(Section):
    """The keys of a service; it adds `monitor`, with a port of its own."""

    nats: NatsSettings = option({}, "overrides of `nats`, key by key")
    memory_limit: Annotated[
        Size, Range("16M", "1T", "a row group of 32M is encoded in parts, and several parts are under way")
    ] = option("128M", "of one process, over all its chains")
    lease_ttl: Annotated[Duration, Range("1s", "10m", "it is renewed every third of it")] = option(
        "15s", "how long a lease of a stopped process stands in the way of another"
    )
    lease_bucket: Annotated[BucketName, Required] = option(
        "FLOE_LEASES", "the key-value bucket of the leases"
    )
    state_bucket: Annotated[BucketName, Required] = option("FLOE_STATE", "the key-value bucket of the state")
    kv_replicas: Annotated[Whole, Range(0, 5)] = option(0, "replicas of the two buckets; 0: as the stream")
    shutdown_timeout: Annotated[Duration, Range("1s", "1h")] = option(
        "30s", "to drain after SIGTERM; what is not done by then is done again later"
    )

    def combinations(self) -> Iterator[tuple[str, str]]:
        if self.lease_bucket == self.state_bucket:
            yield (
                "state_bucket",
                f"expected another than lease_bucket, whose entries expire, found {self.state_bucket} twice",
            )
