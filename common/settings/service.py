"""What egress and ingress have in common as services: starts, the connection to NATS, leases."""

from collections.abc import Iterator
from typing import Annotated

from common.sequences import MAX_SEQUENCE
from common.settings import types as t
from common.settings.types import Section, option, repeated


class StartSettings(Section):
    """The four keys; without any of them, everything in the stream."""

    start_sequence: Annotated[t.Whole, t.Range(0, MAX_SEQUENCE)] = option(0, "begin at this sequence")
    start_time: t.Time = option("", "begin with the first message at or after this time")
    start_delta: t.Duration = option("0s", "begin this long ago")
    start_at_end: t.Flag = option(False, "begin with the next message")

    @property
    def is_set(self) -> bool:
        return bool(self._keys())

    def _keys(self) -> list[str]:
        return self.given("start_sequence", "start_time", "start_delta", "start_at_end")

    def combinations(self) -> Iterator[tuple[str, str]]:
        found = self._keys()
        if len(found) > 1:
            yield found[1], f"expected at most one of the start keys, found {' and '.join(found)}"


NatsUrl = Annotated[t.Text, t.host_url(("nats", "tls"), "user and password_file"), t.TypeName("URL")]


class NatsTlsSettings(Section):
    """TLS to NATS."""

    ca: t.Path = option("", "CA certificates; empty: the system's")
    cert: t.Path = option("", "the client's certificate; with `key`")
    key: t.Path = option("", "the client's private key; with `cert`")
    handshake_first: t.Flag = option(False, "TLS before the server's first line")
    insecure: t.Flag = option(False, "do not check the server's certificate; for tests only, warned of at each start")

    def combinations(self) -> Iterator[tuple[str, str]]:
        yield from self.together("cert", "key")


class NatsSettings(Section):
    """A connection: `url` is a tuple of servers of one cluster; one way to authenticate, or none."""

    url: Annotated[tuple[NatsUrl, ...], t.OneOrMore, t.Required] = option(
        "nats://127.0.0.1:4222", "the server, or a list of servers of one cluster"
    )
    context: t.Label = option("", "a context of the `nats` command")
    credentials_file: t.Path = option("", "a `.creds` file")
    nkey_seed_file: t.Path = option("", "a file with an nkey seed")
    jwt_file: t.Path = option("", "a file with a JWT; with `nkey_seed_file`")
    token: t.Secret = option("", "a token")
    user: t.Label = option("", "a user; with `password`")
    password: t.Secret = option("", "the password of `user`")
    tls: NatsTlsSettings = option({}, "TLS; used where the server asks for it or the URL begins with tls://")
    allow_plaintext: t.Flag = option(
        False, "send user, password or token without TLS to another host; whoever listens on the way has them"
    )
    jetstream_domain: t.Label = option("", "the JetStream domain to speak to")
    inbox_prefix: t.Subject = option("", "what reply subjects begin with; empty: `_INBOX`")
    connect_timeout: Annotated[t.Duration, t.Range("100ms", "5m")] = option("5s", "to connect to one server")

    def combinations(self) -> Iterator[tuple[str, str]]:
        ways = self.given("credentials_file", "nkey_seed_file", "token", "user")
        if len(ways) > 1:
            yield ways[1], f"expected one way to authenticate, found {' and '.join(ways)}"
        if self.jwt_file and not self.nkey_seed_file:
            yield "jwt_file", "expected nkey_seed_file beside it, found none"
        yield from self.together("user", "password")
        if len({url.partition(":")[0] for url in self.url}) > 1:
            yield "url", "expected all of them nats:// or all of them tls://, found both"
        for _, index in repeated(self.url):
            yield f"url.{index}", f"expected each server once, found {self.url[index]} twice"


class ServiceSettings(Section):
    """The keys of a service; it adds `monitor`, with a port of its own."""

    nats: NatsSettings = option({}, "overrides of `nats`, key by key")
    memory_limit: Annotated[
        t.Size, t.Range("16M", "1T", "a row group of 32M is encoded in parts, and several parts are under way")
    ] = option("128M", "of one process, over all its chains")
    lease_ttl: Annotated[t.Duration, t.Range("1s", "10m", "it is renewed every third of it")] = option(
        "15s", "how long a lease of a stopped process stands in the way of another"
    )
    lease_bucket: Annotated[t.BucketName, t.Required] = option("FLOE_LEASES", "the key-value bucket of the leases")
    state_bucket: Annotated[t.BucketName, t.Required] = option("FLOE_STATE", "the key-value bucket of the state")
    kv_replicas: Annotated[t.Whole, t.Range(0, 5)] = option(0, "replicas of the two buckets; 0: as the stream")
    shutdown_timeout: Annotated[t.Duration, t.Range("1s", "1h")] = option(
        "30s", "to drain after SIGTERM; what is not done by then is done again later"
    )

    def combinations(self) -> Iterator[tuple[str, str]]:
        if self.lease_bucket == self.state_bucket:
            why = f"expected another than lease_bucket, whose entries expire, found {self.state_bucket} twice"
            yield "state_bucket", why
