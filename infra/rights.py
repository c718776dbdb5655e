"""The rights of each role in NATS and on the bucket: one table, from which `infra/rights/` and the docs are made.

`python -m infra.rights FOLDER [NAME=VALUE …]` writes the files with names other than those of the committed ones:
`python -m infra.rights rights site=eu-west stream=NODE_DATA bucket=archive`. The names are the fields of `RightsNames`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from common.settings.root import Settings


@dataclass(frozen=True, slots=True)
class RightsNames:
    """The names in the rights. `subjects`: the prefix of the target's subjects; `copy`: a stream to replay into.

    `domain`: the JetStream domain that is used. A server inside it removes the domain from a subject before it checks
    permissions; `outside`, if not empty: the connection is to a server that does not.
    """

    site: str = "us-east"
    stream: str = "NODES"
    target: str = "FLEET"
    subjects: str = "FLEET"
    copy: str = "COPY"
    copy_subjects: str = "copy"
    lease_bucket: str = "FLOE_LEASES"
    state_bucket: str = "FLOE_STATE"
    bucket: str = "floe"
    prefix: str = "data"
    domain: str = ""
    outside: str = ""
    inbox: str = "_INBOX"

    def fill(self, text: str) -> str:
        """Return `text` with the names in place of `{name}`, and with `{api}` and `{kv}` for the domain."""
        api = f"$JS.{self.domain}.API"
        plain = {"api": "$JS.API", "kv": "$KV", "subscribed": f"{api}.$KV" if self.domain else "$KV"}
        requested = {**plain, "api": api, "kv": f"{api}.$KV"} if self.domain and self.outside else plain
        names = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in {**requested, **names}.items():
            text = text.replace(f"{{{name}}}", value)
        return text


@dataclass(frozen=True, slots=True)
class SubjectRights:
    """Subjects that a role publishes or subscribes to. `condition`: when it needs them, empty for always."""

    subjects: tuple[str, ...]
    condition: str = ""
    is_subscribe: bool = False


@dataclass(frozen=True, slots=True)
class KeyRights:
    """S3 actions on keys below the prefix, with `*` for any text."""

    actions: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoleRights:
    """The rights of a role. `commands`: those that it may run. `nats`: empty if it never connects. `list_prefixes`:
    prefixes that it may list; `s3`: empty if another role has the policy. `note`: text that follows the commands.
    """

    name: str
    commands: tuple[str, ...]
    nats: tuple[SubjectRights, ...]
    s3: tuple[KeyRights, ...]
    list_prefixes: tuple[str, ...] = ("",)
    note: str = ""

    @property
    def command_list(self) -> str:
        """The commands, those of one group together."""
        groups: dict[str, list[str]] = {}
        for each in self.commands:
            group, _, rest = each.partition(" ")
            name = f"`{rest}`" if group in groups else f"`floe {each}`"
            groups.setdefault(group, []).append(name)
        return ", ".join(", ".join(names) for names in groups.values()) + self.note


def _stream(name: str, *calls: str) -> tuple[str, ...]:
    return tuple(f"{{api}}.STREAM.{call}.{name}" for call in calls)


def _consumer(stream: str, *calls: str) -> tuple[str, ...]:
    return tuple(f"{{api}}.CONSUMER.{call}.{stream}.>" for call in calls)


def _kv(bucket: str) -> tuple[str, ...]:
    return (*_stream(f"KV_{bucket}", "INFO", "CREATE", "MSG.GET"), f"{{kv}}.{bucket}.>")


def _lease_subjects(role: str) -> tuple[str, ...]:
    """Return both forms of the lease subjects: with a domain, a client subscribes to both, inside and outside of it."""
    return (f"$KV.{{lease_bucket}}.{role}.>", f"{{subscribed}}.{{lease_bucket}}.{role}.>")


STATE, LEASES = _kv("{state_bucket}"), _kv("{lease_bucket}")
INFO_CALLS, CREATE_CALLS = ("INFO", "MSG.GET"), ("INFO", "CREATE", "MSG.GET")
CONSUMER_CALLS = ("CREATE", "MSG.NEXT", "DELETE")
TARGET_READ = (*_stream("{target}", *INFO_CALLS), *_consumer("{target}", *CONSUMER_CALLS))
# In the second form, that of nats-server 2.16, the domain and the account come before the stream.
ACKS = ("$JS.ACK.{stream}.>", "$JS.ACK.*.*.{stream}.>")
INBOX = SubjectRights(("{inbox}.>",), is_subscribe=True)
LEASE_RELEASE_CONDITION = "to notice a released lease at once"

GET, PUT, DELETE = ("s3:GetObject",), ("s3:PutObject", "s3:AbortMultipartUpload"), ("s3:DeleteObject",)
READ_ALL = KeyRights(GET, ("*",))
SITE_DOCUMENTS = ("site={site}", "tails/{site}", "alive/{site}", "compare/site={site}")
SITE_KEYS = ("site={site}/*", *(f"_floe/{each}/*" for each in SITE_DOCUMENTS))
CAPTURE_KEYS = tuple(f"_floe/site=*/{kind}/*" for kind in ("config", "consumers", "deletions"))
AUDIT_KEYS = "_floe/audit/*"
TOMBSTONE_RUN_KEYS = ("_floe/tombstones/runs/*",)


def _egress_subjects(stream: str, *acks: str) -> tuple[SubjectRights, ...]:
    return (
        SubjectRights((*_stream(stream, *INFO_CALLS), *_consumer(stream, *CONSUMER_CALLS, "INFO"))),
        SubjectRights(STATE),
        SubjectRights(LEASES),
        INBOX,
        SubjectRights(_lease_subjects("egress"), LEASE_RELEASE_CONDITION, is_subscribe=True),
        SubjectRights((f"{{api}}.CONSUMER.NAMES.{stream}", *acks), "for a work queue or an interest stream"),
        SubjectRights((f"{{api}}.CONSUMER.LIST.{stream}",), "unless `capture_consumers: never`"),
    )


EGRESS = RoleRights(
    "egress",
    (
        *("egress run", "egress init", "egress flush", "egress resolve", "egress repartition"),
        *("import", "status", "fleet", "compare"),
    ),
    (
        *_egress_subjects("{stream}", *ACKS),
        SubjectRights(("{api}.STREAM.NAMES", "{api}.STREAM.INFO.*"), "to name the streams that no feed archives"),
    ),
    (KeyRights((*GET, *PUT), (*SITE_KEYS, "_floe/audit/*/site={site}/*")), KeyRights(GET, TOMBSTONE_RUN_KEYS)),
    (*SITE_KEYS, *TOMBSTONE_RUN_KEYS),
    note="; `status`, `fleet` and `compare` of its site",
)
DELETIONS = SubjectRights(("$JS.EVENT.ADVISORY.STREAM.DELETED.>",), "to distinguish deleted and lost streams", True)
ACCOUNT_SUBJECTS = (SubjectRights(("{api}.STREAM.NAMES",)), *_egress_subjects("*", "$JS.ACK.>"), DELETIONS)

ROLES = (
    EGRESS,
    replace(EGRESS, name="egress-account", nats=ACCOUNT_SUBJECTS, s3=(), note=" of every stream of the account"),
    RoleRights(
        "ingress",
        ("ingress run",),
        (
            SubjectRights((*_stream("{target}", *CREATE_CALLS), "{subjects}.>")),
            SubjectRights(STATE),
            SubjectRights(LEASES),
            INBOX,
            SubjectRights(_lease_subjects("ingress"), LEASE_RELEASE_CONDITION, is_subscribe=True),
        ),
        (READ_ALL, KeyRights(PUT, ("_floe/ingress/*",))),
    ),
    RoleRights(
        "compaction",
        ("compact",),
        (),
        (
            READ_ALL,
            KeyRights((*PUT, *DELETE), ("site=*", "_floe/tombstones/*", "_floe/site=*/probe/*")),
            KeyRights(DELETE, ("_floe/site=*/state/*", *CAPTURE_KEYS)),
            KeyRights(PUT, ("_floe/site=*/floor.json",)),
        ),
    ),
    RoleRights(
        "operator",
        (
            *("status", "checkpoint ls", "checkpoint set", "checkpoint release"),
            *(
                "chain ls",
                "chain pause",
                "chain resume",
                "gap ls",
                "gap accept",
                "parked ls",
                "parked cat",
                "parked retry",
            ),
            *("segments ls", "segments info", "segments cat", "segments verify", "segments quarantine"),
            *("consumers ls", "check", "audit ls", "fleet"),
        ),
        (SubjectRights(TARGET_READ), SubjectRights(STATE), INBOX),
        (
            READ_ALL,
            KeyRights(PUT, ("_floe/site=*/gaps/*", "_floe/ingress/*", "_floe/quarantine/*", AUDIT_KEYS)),
            KeyRights(DELETE, ("site=*",)),
        ),
        note=" (of `egress` and `ingress` it asks only the monitor)",
    ),
    RoleRights(
        "replay",
        ("replay",),
        (
            SubjectRights((*_stream("{copy}", *CREATE_CALLS), "{copy_subjects}.>")),
            SubjectRights(STATE),
            SubjectRights(LEASES),
            SubjectRights(_stream("{target}", "INFO"), "to make a bucket with as many replicas"),
            INBOX,
        ),
        (READ_ALL, KeyRights(PUT, (AUDIT_KEYS,))),
    ),
    RoleRights(
        "restore",
        ("restore", "export"),
        (
            SubjectRights(
                (
                    "{api}.INFO",
                    *_stream("{stream}", "INFO", "RESTORE", "UPDATE", "DELETE"),
                    "$JS.SNAPSHOT.RESTORE.{stream}.>",
                    "{api}.CONSUMER.LIST.{stream}",
                    *_consumer("{stream}", *CONSUMER_CALLS),
                )
            ),
            SubjectRights(LEASES),
            SubjectRights(("{api}.STREAM.NAMES",), "to find the stream with its subjects before it is filled"),
            INBOX,
        ),
        (READ_ALL, KeyRights(PUT, ("_floe/site=*/restored/*", AUDIT_KEYS))),
    ),
    RoleRights(
        "drill",
        ("drill",),
        (
            SubjectRights(
                ("{api}.STREAM.NAMES", *_stream("*", *CREATE_CALLS, "DELETE"), *_consumer("*", *CONSUMER_CALLS))
            ),
            SubjectRights(("_floe_drill.>",)),
            SubjectRights(
                ("{api}.INFO", *_stream("*", "RESTORE"), "$JS.SNAPSHOT.RESTORE.*.>", "{api}.CONSUMER.LIST.*"),
                "for `--exact`",
            ),
            SubjectRights(STATE),
            SubjectRights(LEASES),
            INBOX,
        ),
        (READ_ALL,),
        note=", into streams `FLOE_DRILL_…` (permissions know no such prefix: `*`)",
    ),
    RoleRights(
        "compare",
        ("compare",),
        (
            SubjectRights((*_stream("{stream}", "INFO"), *_consumer("{stream}", *CONSUMER_CALLS))),
            SubjectRights((*TARGET_READ, *_stream("KV_{state_bucket}", *INFO_CALLS)), "for `--with target`"),
            INBOX,
        ),
        (READ_ALL, KeyRights(PUT, ("_floe/compare/*",))),
    ),
)

#: Commands without a role, by reason.
COMMANDS_WITHOUT_ROLE = {
    "it has the rights of the role that it examines": ("doctor", "config check"),
    "its rights are in the table of single commands": ("advisories",),
    "it makes what it needs": ("demo", "emulate"),
    "it needs s3:ListBucket and s3:CreateBucket, which no role has": ("store create",),
    "it connects to nothing": ("config import-stream-replicator", "site add", "version", "completion"),
}


def nats_conf(role: RoleRights, *names: RightsNames) -> str:
    """Return permissions to include in a user of nats-server; conditional ones come last, with their reasons. `names`:
    several for several streams.
    """
    lines = [f"# {role.name}: {role.command_list}", "permissions: {"]
    for word, is_subscribe in (("publish", False), ("subscribe", True)):
        lines.append(f"  {word}: {{ allow: [")
        for rule in sorted(
            (rule for rule in role.nats if rule.is_subscribe is is_subscribe), key=lambda rule: bool(rule.condition)
        ):
            lines += [f"    # {rule.condition}"] if rule.condition else []
            subjects = (each.fill(subject) for each in names for subject in rule.subjects)
            lines += [f'    "{subject}"' for subject in dict.fromkeys(subjects)]
        lines.append("  ] }")
    return "\n".join([*lines, "}", ""])


def s3_policy(role: RoleRights, names: RightsNames) -> dict[str, Any]:
    """Return the policy in the form that Amazon S3, MinIO and SeaweedFS read."""
    arn, base = f"arn:aws:s3:::{names.bucket}", f"{names.prefix}/" if names.prefix else ""
    list_prefixes = [f"{base}{names.fill(each).removesuffix('*')}*" for each in role.list_prefixes]
    listing = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [arn]}
    statements = [{**listing, "Condition": {"StringLike": {"s3:prefix": list_prefixes}}}]
    for rule in role.s3:
        resources = [f"{arn}/{base}{names.fill(key)}" for key in rule.keys]
        statements.append({"Effect": "Allow", "Action": list(rule.actions), "Resource": resources})
    return {"Version": "2012-10-17", "Statement": statements}


def rights_files(names: RightsNames) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each file."""
    for role in ROLES:
        if role.nats:
            yield f"nats-{role.name}.conf", nats_conf(role, names)
        if role.s3:
            yield f"s3-{role.name}.json", json.dumps(s3_policy(role, names), indent=2) + "\n"


def site_files(settings: Settings, site: str, streams: Sequence[str]) -> dict[str, str]:
    """Return the name and the content of each file of a new site that archives `streams`, with `*` for any text, into
    the bucket of `settings`, without its credentials.
    """
    scheme, _, bucket = settings.store.url.partition("://")
    store = settings.store.model_dump(mode="json", exclude_unset=True, exclude={"access_key_id", "secret_access_key"})
    wide = [each for each in streams if "*" in each]
    feeds = [{"stream": each} for each in streams if each not in wide] + ([{"streams": wide}] if wide else [])
    document = {"site": site, "nats": {"url": "nats://127.0.0.1:4222"}, "store": store, "egress": {"feeds": feeds}}
    secrets = "# Add the credentials of this site, to `nats` and to `store`.\n"
    files = {"site.yaml": secrets + yaml.safe_dump(document, sort_keys=False)}
    names = [RightsNames(site=site, stream=each, bucket=bucket, prefix=settings.store.prefix) for each in streams]
    role = next(each for each in ROLES if each.name == ("egress-account" if wide else "egress"))
    files[f"nats-{role.name}.conf"] = nats_conf(role, *names)
    if scheme == "s3":
        files["s3-egress.json"] = json.dumps(s3_policy(EGRESS, names[0]), indent=2) + "\n"
    return files


def main(words: list[str]) -> None:
    """Write the files into the folder named by the first word; the other words set names."""
    known = [each.name for each in fields(RightsNames)]
    given = dict(word.partition("=")[::2] for word in words[1:])
    if not words or not given.keys() <= set(known):
        sys.exit(f"python -m infra.rights FOLDER [NAME=VALUE …]: expected names of {' '.join(known)}")
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in rights_files(RightsNames(**given)):
        (folder / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:])
