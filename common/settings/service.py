"""Settings that egress and ingress share as services: start positions, the NATS connection, leases."""

import re
from collections.abc import Iterator
from socket import gethostname
from typing import Annotated, Literal, NamedTuple, Self

from common.sequences import MAX_SEQUENCE
from common.settings import types as t
from common.settings.types import Section, find_repeated, option


class StartSettings(Section):
    """The four keys for a start position; without any of them, the whole stream."""

    start_sequence: Annotated[t.Whole, t.Range(0, MAX_SEQUENCE)] = option(0, "begin at this sequence")
    start_time: t.Time = option("", "begin with the first message at or after this time")
    start_delta: t.Duration = option("0s", "begin this long ago")
    start_at_end: t.Flag = option(False, "begin with the next message")

    @property
    def is_set(self) -> bool:
        return bool(self._keys())

    def _keys(self) -> list[str]:
        return self.keys_set("start_sequence", "start_time", "start_delta", "start_at_end")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        found = self._keys()
        if len(found) > 1:
            yield found[1], f"expected at most one of the start keys, found {' and '.join(found)}"


_DOMAIN = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
NatsUrl = Annotated[t.Text, t.host_url(("nats", "tls"), "user and password_file"), t.TypeName("URL")]


API_PREFIX = "$JS.API"  # by default
PUPPET_SSL = "/etc/puppetlabs/puppet/ssl"


class TlsPaths(NamedTuple):
    """Files of a client; empty: the system's authorities, no certificate."""

    ca: str
    cert: str
    key: str


class NatsTlsSettings(Section):
    """TLS to NATS. `files` gives the paths for every scheme."""

    scheme: Literal["files", "puppet"] = option(
        "files", "the place of the files; puppet: those of this host's Puppet agent, in place of the three keys"
    )
    ca: t.Path = option("", "CA certificates; empty: the system's")
    cert: t.Path = option("", "the client's certificate; with `key`")
    key: t.Path = option("", "the client's private key; with `cert`")
    identity: t.Label = option("", "with `puppet`: the name of the certificate; empty: the host's name")
    ssl_dir: t.Path = option("", "with `puppet`: the agent's folder; empty: `/etc/puppetlabs/puppet/ssl`")
    handshake_first: t.Flag = option(False, "TLS before the server's first line")
    insecure: t.Flag = option(False, "do not check the server's certificate; for tests only: each start warns of it")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from self.require_together("cert", "key")
        is_puppet = self.scheme == "puppet"
        for key in self.keys_set("ca", "cert", "key") if is_puppet else self.keys_set("identity", "ssl_dir"):
            yield key, f"expected none with scheme {self.scheme}, found one"
        if "/" in self.identity:
            yield "identity", "expected a name without a slash, found one"

    @property
    def files(self) -> TlsPaths:
        """The files that `scheme` selects."""
        if self.scheme == "files":
            return TlsPaths(self.ca, self.cert, self.key)
        home, pem = self.ssl_dir or PUPPET_SSL, f"{self.identity or gethostname().lower()}.pem"
        return TlsPaths(f"{home}/certs/ca.pem", f"{home}/certs/{pem}", f"{home}/private_keys/{pem}")


class NatsSettings(Section):
    """A connection: `url` is a tuple of servers of one cluster; at most one way to authenticate."""

    url: Annotated[tuple[NatsUrl, ...], t.OneOrMore, t.Required] = option(
        "nats://127.0.0.1:4222", "the server, or a list of servers of one cluster"
    )
    context: t.Label = option("", "a context of the `nats` command, for the keys that are not set here")
    credentials_file: t.Path = option("", "a `.creds` file")
    nkey_seed_file: t.Path = option("", "a file with an nkey seed")
    jwt_file: t.Path = option("", "a file with a JWT; with `nkey_seed_file`")
    token: t.Secret = option("", "a token")
    user: t.Label = option("", "a user; with `password`")
    password: t.Secret = option("", "the password of `user`")
    tls: NatsTlsSettings = option({}, "TLS; used if the server requires it or the URL begins with tls://")
    allow_plaintext: t.Flag = option(
        False, "send user, password or token without TLS to another host; anyone on the network path can read them"
    )
    jetstream_domain: Annotated[t.Text, t.matching(_DOMAIN, "a domain: no space . * > / or \\"), t.TypeName("name")] = (
        option("", "the JetStream domain of the streams and buckets")
    )
    jetstream_api_prefix: t.Subject = option(
        "", "instead of a domain: the prefix in place of `$JS.API`, if another account exports its API"
    )
    inbox_prefix: t.Subject = option("", "the prefix of reply subjects; empty: `_INBOX`")
    connect_timeout: Annotated[t.Duration, t.Range("100ms", "5m")] = option("5s", "the limit to connect to one server")

    @property
    def api_prefix(self) -> str:
        """The beginning of every subject of the JetStream API, without a dot at its end."""
        domain = self.jetstream_domain
        return self.jetstream_api_prefix or (f"$JS.{domain}.API" if domain else API_PREFIX)

    def from_context(self, context: str) -> Self:
        """Return the connection of a context alone; only the keys that no context can hold are kept from this one."""
        kept = self.model_dump(exclude_unset=True, include={"allow_plaintext", "connect_timeout"})
        return type(self).model_validate({**kept, "context": context})

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        ways = self.keys_set("credentials_file", "nkey_seed_file", "token", "user")
        if len(ways) > 1:
            yield ways[1], f"expected one way to authenticate, found {' and '.join(ways)}"
        if self.jetstream_domain and self.jetstream_api_prefix:
            yield "jetstream_api_prefix", "expected either jetstream_domain or jetstream_api_prefix, found both"
        if self.jwt_file and not self.nkey_seed_file:
            yield "jwt_file", "expected nkey_seed_file with it, found none"
        yield from self.require_together("user", "password")
        if len({url.partition(":")[0] for url in self.url}) > 1:
            yield "url", "expected all of them nats:// or all of them tls://, found both"
        for _, index in find_repeated(self.url):
            yield f"url.{index}", f"expected each server once, found {self.url[index]} twice"


class MonitorTlsSettings(Section):
    """TLS of the monitor's pages; without a certificate they are served over plain HTTP."""

    cert: t.Path = option("", "the certificate of this server; with `key`; empty: HTTP without TLS")
    key: t.Path = option("", "its private key; with `cert`")
    client_ca: t.Path = option("", "the CA of clients' certificates; empty: none is required")

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        yield from self.require_together("cert", "key")
        if self.client_ca and not self.cert:
            yield "client_ca", "expected cert and key with it, found none"


class ServiceSettings(Section):
    """The common keys of a service; each service adds `monitor`, with its own port."""

    nats: NatsSettings = option({}, "overrides of `nats`, key by key")
    memory_limit: Annotated[
        t.Size, t.Range("16M", "1T", "a row group of 32M is encoded in parts, and several parts are under way")
    ] = option("128M", "the memory of one process, over all its chains")
    lease_ttl: Annotated[t.Duration, t.Range("1s", "10m", "it is renewed every third of it")] = option(
        "15s", "how long the lease of a stopped process blocks another process"
    )
    lease_bucket: Annotated[t.BucketName, t.Required] = option("FLOE_LEASES", "the key-value bucket of the leases")
    state_bucket: Annotated[t.BucketName, t.Required] = option("FLOE_STATE", "the key-value bucket of the state")
    kv_replicas: Annotated[t.Whole, t.Range(0, 5)] = option(0, "replicas of the two buckets; 0: as the stream")
    kv_max_bytes: Annotated[t.Size, t.Range("1M", "1T")] = option(
        "64M", "`max_bytes` of the state bucket, if the account requires it; the lease bucket gets an eighth"
    )
    shutdown_timeout: Annotated[t.Duration, t.Range("1s", "1h")] = option(
        "30s", "the limit to drain after SIGTERM; work that is not done by then is repeated later"
    )

    @property
    def lease_bytes(self) -> int:
        """`max_bytes` of the lease bucket, if the account requires a limit."""
        return self.kv_max_bytes // 8

    def combination_problems(self) -> Iterator[tuple[str, str]]:
        if self.lease_bucket == self.state_bucket:
            reason = f"expected a bucket other than lease_bucket, whose entries expire, found {self.state_bucket} twice"
            yield "state_bucket", reason
