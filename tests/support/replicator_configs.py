"""Configurations of stream-replicator for tests: those of its documentation, rewritten."""

HEAD = """\
name: US-EAST
monitor_port: 8080
loglevel: info
state_store: /var/lib/stream-replicator
logfile: /var/log/stream-replicator.log
"""

_WAY = """\
    source_url: nats://nats.us-east.example.net:4222
    target_url: nats://nats.central.example.net:4222
"""

BASIC = HEAD + "streams: [] # see other documentation pages\n"

WHOLE = f"{HEAD}streams:\n  - stream: NODE_DATA\n{_WAY}    target_initiated: true\n"

RENAMED = f"""{HEAD}streams:
  - stream: NODE_DATA
    target_stream: FLEET_NODES
    target_subject_prefix: FLEET_NODES
    target_subject_remove: NODE_DATA
{_WAY}    target_initiated: true
"""

FILTERED = RENAMED + "    filter_subject: sku.eu.fr.cdg.>\n    start_sequence: 1\n"

SAMPLED = f"""{HEAD}streams:
  - stream: NODE_DATA
{_WAY}    inspect_field: sender
    inspect_force_field: force_copy
    inspect_duration: 1h
    warn_duration: 12m
    size_trigger: 1024
    advisory:
       subject: NODE_DATA_ADVISORIES
       reliable: true
"""

PARTITIONED = f"""{HEAD}streams:
  - stream: NODE_DATA
{_WAY}    target_initiated: true
    leader_election_name: NODE_DATA_P0
    filter_subject: NODES.US-EAST-1.0.>

  - stream: NODE_DATA
{_WAY}    target_initiated: true
    leader_election_name: NODE_DATA_P1
    filter_subject: NODES.US-EAST-1.1.>
"""

REGISTRATION = f"""{HEAD.replace("8080", "9100")}streams:
  - stream: CHORIA_REGISTRATION
    source_url: nats://choria.us-east.example.net:4222
    target_url: nats://nats.central.example.net:4222
    inspect_field: sender
    inspect_duration: 1h
    warn_duration: 11m
    size_trigger: 1024
    tls:
       ca: /path/to/ca.pem
       key: /path/to/key.pem
       cert: /path/to/cert.pem
    advisory:
       subject: choria.stream.input.registration_advisories
       reliable: true

  - stream: CHORIA_REGISTRATION_ADVISORIES
    source_url: nats://choria.us-east.example.net:4222
    target_url: nats://nats.central.example.net:4222
    tls:
       ca: /path/to/ca.pem
       key: /path/to/key.pem
       cert: /path/to/cert.pem
"""

HEARTBEATS = (
    WHOLE
    + """\
heartbeats:
  interval: 10s
  url: nats://broker.choria.local:4222
  leader_election: false

  # tls:
  #   ca: /path/to/ca.pem

  choria:
    seed_file: /etc/stream-replicator/credentials/choria.seed
    jwt_file: /etc/stream-replicator/credentials/choria.jwt
    collective: choria

  headers:
    from: choria_compose

  subjects:
    - subject: choria.node_metadata._monitor
    - subject: example._monitor
      interval: 20s
      headers:
        noop: "true"
"""
)

LOGINS = """\
name: US-EAST
tls: {ca: /path/to/ca.pem, cert: /path/to/cert.pem, key: /path/to/key.pem}
choria: {seed_file: /etc/choria.seed, jwt_file: /etc/choria.jwt, collective: choria}
streams:
  - stream: A
    source_url: nats://source.example.net:4222?credentials=/etc/nats.creds&connect_timeout=5s
    target_url: nats://target.example.net:4222?jwt=/etc/client.jwt&nkey=/etc/client.nk&insecure=true
    target_tls: {ca: /path/to/second-ca.pem}
  - stream: B
    source_url: nats://user:pass@one.example.net:4222,nats://user:pass@two.example.net
    target_url: nats://target.example.net:4222?tls_handshake_first=true
"""

DOCUMENTED = {
    "basic": BASIC,
    "whole": WHOLE,
    "renamed": RENAMED,
    "filtered": FILTERED,
    "sampled": SAMPLED,
    "partitioned": PARTITIONED,
    "registration": REGISTRATION,
    "heartbeats": HEARTBEATS,
    "logins": LOGINS,
}

# The JSON names of the structs of config/config.go, and the parameters that internal/util/util.go reads.
KEYS = """
name streams state_store tls choria monitor_port profiling logfile loglevel heartbeats
streams.name streams.stream streams.filter_subject streams.target_stream streams.target_subject_prefix
streams.target_subject_remove streams.source_url streams.no_target_create streams.ephemeral streams.target_url
streams.target_initiated streams.start_sequence streams.start_time streams.start_delta streams.start_at_end
streams.tls streams.source_tls streams.target_tls streams.choria streams.source_choria streams.target_choria
streams.max_age streams.inspect_field streams.inspect_force_field streams.inspect_header
streams.inspect_subject_token streams.inspect_duration streams.warn_duration streams.size_trigger
streams.leader_election_name streams.advisory streams.advisory.subject streams.advisory.reliable
tls.ca tls.cert tls.key choria.seed_file choria.jwt_file choria.collective
heartbeats.leader_election heartbeats.interval heartbeats.headers heartbeats.subjects heartbeats.tls
heartbeats.choria heartbeats.url heartbeats.subjects.subject heartbeats.subjects.interval
heartbeats.subjects.headers
""".split()  # noqa: SIM905
PARAMETERS = ["credentials", "jwt", "nkey", "tls_handshake_first", "insecure", "connect_timeout"]

# The form before 0.5.
TOPICS = """\
debug: true
logfile: /var/log/stream-replicator.log
state_dir: /var/cache/stream-replicator
tls: {identity: foo.replicator, scheme: puppet, ssl_dir: /etc/sr/ssl}
topics:
  cmdb:
    topic: acme.cmdb
    workers: 10
    source_url: nats://s:4222
    source_cluster_id: dc1
    target_url: nats://t:4222
    target_cluster_id: dc2
    queued: true
    queue_group: cmdb
    inspect: host
    update_flag: updated
    age: 1h
    monitor: 10000
    name: cmdb_replicator
    disable_target_tls: true
    advisory: {target: sr.advisories.cmdb, cluster: target, age: 30m}
"""
