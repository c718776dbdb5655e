"""What works beside ingress in the delivery runs: a site that freezes one chain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.chain import Chain
from infra.local.nats import NatsServer
from infra.oracle import Trace, prefixed, source_trace
from tests.scenarios.delivery_centre import PREFIX
from tests.scenarios.load import Load, make_stream
from tests.scenarios.processes import Service
from tests.support.ingress import client_of

SITES, FEEDS = ("alpha", "beta"), ("ONE", "TWO", "THREE")
FROZEN = Chain("alpha", "THREE")  # by a real egress; segments of the others are written by the run itself
WRITTEN = [Chain(site, feed) for site in SITES for feed in FEEDS if Chain(site, feed) != FROZEN]


class Egress:
    """A site with a stream under load and an egress, both undisturbed: other runs are about their faults."""

    def __init__(self, folder: Path, store: Mapping[str, Any], rng: random.Random, rate: int) -> None:
        self._server = NatsServer(folder / "site", name=FROZEN.site)
        config = folder / "egress.yaml"
        config.write_text(yaml.safe_dump(_egress_config(self._server.url, store)))
        config.chmod(0o600)
        self._service = Service(folder, "egress", "egress", "run", "-c", str(config))
        self._load = Load(self._server.url, FROZEN.site, rng, rate)

    async def __aenter__(self) -> Egress:
        await asyncio.to_thread(self._server.start)
        async with client_of(self._server.url) as client:
            await make_stream(client, FROZEN.feed, FROZEN.site)
        self._service.start()
        await self._load.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service.kill()
        self._server.close()

    async def drained(self) -> dict[Chain, Trace]:
        """End the load and the egress; what the target must hold of the stream."""
        await self._load.__aexit__()
        assert await asyncio.to_thread(self._service.drain) == 0, self._service.tail()
        async with client_of(self._server.url) as client:
            return {FROZEN: await source_trace(client, FROZEN.feed, prefixed(PREFIX))}


def _egress_config(url: str, store: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "site": FROZEN.site,
        "nats": {"url": url},
        "store": dict(store),
        "egress": {
            "monitor": {"listen": ""},
            "lease_ttl": "2s",
            "defaults": {"segment": {"max_age": "1s", "max_messages": 2000}},
            "feeds": [{"stream": FROZEN.feed}],
        },
    }
