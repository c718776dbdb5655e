"""What egress and ingress have in common as services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator

from common.sequences import MAX_SEQUENCE
from common.settings.base import Section, option, several
from common.settings.types import (
    BucketName,
    Duration,
    Flag,
    Label,
    OneOrMore,
    Path,
    Range,
    Required,
    Secret,
    Size,
    Subject,
    Text,
    Time,
    TypeName,
    Whole,
    check_host_url,
)


class StartSettings(Section):
    """The four keys; without any, everything there is."""

    start_sequence: Annotated[Whole, Range(0, MAX_SEQUENCE)] = option(0, "begin at this sequence")
    start_time: Time = option("", "begin with the first message at or after this time")
    start_delta: Duration = option("0s", "begin this long ago")
    start_at_end: Flag = option(False, "begin with the next message")

    @property
    def is_set(self) -> bool:
        """Whether any of the keys says something."""
        return bool(self.start_sequence or self.start_time or self.start_delta or self.start_at_end)

    def combinations(self) -> Iterator[tuple[str, str]]:
        found = several(
            {
                "start_sequence": self.start_sequence,
                "start_time": self.start_time,
                "start_delta": self.start_delta,
                "start_at_end": self.start_at_end,
            }
        )
        if len(found) > 1:
            yield found[1], f"expected at most one of the start keys, found {' and '.join(found)}"


def _check_url(text: str) -> str:
    return check_host_url(text, ("nats", "tls"), "user and password_file")


NatsUrl = Annotated[Text, AfterValidator(_check_url), TypeName("URL")]


class NatsTlsSettings(Section):
    """TLS to NATS."""

    ca: Path = option("", "CA certificates; empty: the system's")
    cert: Path = option("", "the client's certificate; with `key`")
    key: Path = option("", "the client's private key; with `cert`")
    handshake_first: Flag = option(False, "TLS before the server's first line")
    insecure: Flag = option(
        False, "do not check the server's certificate; for tests only, warned of at each start"
    )

    def combinations(self) -> Iterator[tuple[str, str]]:
        if bool(self.cert) != bool(self.key):
            there, missing = ("cert", "key") if self.cert else ("key", "cert")
            yield there, f"expected {missing} beside it, found none"


class NatsSettings(Section):
    """A connection: `url` is a tuple of servers of one cluster; one way to authenticate, or none."""

    url: Annotated[tuple[NatsUrl, ...], OneOrMore, Required] = option(
        "nats://127.0.0.1:4222", "the server, or a list of servers of one cluster"
    )
    context: Label = option("", "a context of the `nats` command")
    credentials_file: Path = option("", "a `.creds` file")
    nkey_seed_file: Path = option("", "a file with an nkey seed")
    jwt_file: Path = option("", "a file with a JWT; with `nkey_seed_file`")
    token: Secret = option("", "a token")
    user: Label = option("", "a user; with `password`")
    password: Secret = option("", "the password of `user`")
    tls: NatsTlsSettings = option({}, "TLS; used where the server asks for it or the URL begins with tls://")
    allow_plaintext: Flag = option(
        False, "send user, password or token without TLS to another host; whoever listens on the way has them"
    )
    jetstream_domain: Label = option("", "the JetStream domain to speak to")
    inbox_prefix: Subject = option("", "what reply subjects begin with; empty: `_INBOX`")
    connect_timeout: Annotated[Duration, Range("100ms", "5m")] = option("5s", "to connect to one server")

    def combinations(self) -> Iterator[tuple[str, str]]:
        ways = several(
            {
                "credentials_file": self.credentials_file,
                "nkey_seed_file": self.nkey_seed_file,
                "token": self.token.get_secret_value(),
                "user": self.user,
            }
        )
        if len(ways) > 1:
            yield ways[1], f"expected one way to authenticate, found {' and '.join(ways)}"
        if self.jwt_file and not self.nkey_seed_file:
            yield "jwt_file", "expected nkey_seed_file beside it, found none"
        yield from self._password()
        yield from self._servers()

    def _password(self) -> Iterator[tuple[str, str]]:
        password = self.password.get_secret_value()
        if self.user and not password:
            yield "user", "expected password or password_file beside it, found none"
        if password and not self.user:
            yield "password", "expected user beside it, found none"

    def _servers(self) -> Iterator[tuple[str, str]]:
        if len({url.partition(":")[0] for url in self.url}) > 1:
            yield "url", "expected all of them nats:// or all of them tls://, found both"
        for index, url in enumerate(self.url):
            if url in self.url[:index]:
                yield f"url.{index}", f"expected each server once, found {url} twice"


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
