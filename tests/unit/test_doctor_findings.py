"""Findings of `floe doctor`: the exit code, the rules of buckets, and the reference, which has every check."""

import pytest

from common import doctor
from common.doctor_cli import _limits
from common.errors import ConfigError, FloeError, OutcomeUnknown, Refused, Unavailable
from common.objects.port import LifecycleRule
from common.objects.s3_transfer import enabled_rules
from common.settings.service import NatsSettings
from tests.support import reference

GOOD, WARNED = doctor.ok("nats", "version", "2.15.1"), doctor.warning("nats", "version", "2.9.0", "old")
BAD, LEFT_OUT = (
    doctor.problem("nats", "target", "none", "nothing is carried"),
    doctor.skipped("nats", "jetstream", "not told"),
)
AWAY = doctor.failed("nats", "connection", Unavailable("no answer"))


def test_the_reference_has_every_check_and_no_other() -> None:
    assert {part: (*rows,) for part, rows in reference.data("doctor").items()} == doctor.CHECKS
    with pytest.raises(AssertionError):
        doctor.ok("store", "version", "1")


@pytest.mark.parametrize(
    ("findings", "code"),
    [((), 0), ((GOOD, WARNED, LEFT_OUT), 0), ((GOOD, AWAY), 1), ((AWAY, BAD, GOOD), 3), ((BAD,), 3)],
)
def test_the_worst_finding_decides(findings: tuple[doctor.DoctorFinding, ...], code: int) -> None:
    assert doctor.Examination(("egress",), findings).exit_code == code
    waits = [doctor.cap_timeout(NatsSettings(connect_timeout=seconds)).connect_timeout for seconds in (300.0, 0.5)]
    assert waits == [doctor.CONNECT_TIMEOUT_S, 0.5], "a long timeout is that of services"


ERRORS = [
    (Unavailable("away"), "skipped"),
    (OutcomeUnknown("lost"), "skipped"),
    (Refused("denied", hint="grant it"), "problem"),
    (ConfigError("no such bucket"), "problem"),
    *((Unavailable("why", code=code), "problem") for code in ("E-STORE-FULL", "E-S3-TLS", "E-STORE-ROOT")),
]


@pytest.mark.parametrize(("error", "state"), ERRORS)
def test_an_error_is_a_finding_with_a_meaning(error: FloeError, state: str) -> None:
    found = doctor.failed("store", "write", error, todo="a command")
    assert (found.state, found.unreached, found.found) == (state, state == "skipped", f"{error.code}: {error.message}")
    assert found.meaning
    assert found.todo.split("\n") == [*filter(None, [error.hint]), "a command"]
    assert state == "problem" or doctor.failed("nats", "rights", error).todo


def test_rules_of_a_bucket_are_read_in_all_their_forms() -> None:
    days = {"Days": 30}
    rules = [
        {"ID": "off", "Status": "Disabled", "Filter": {}, "Expiration": days},
        {"ID": "all", "Status": "Enabled", "Expiration": days},
        {"ID": "old form", "Status": "Enabled", "Prefix": "data/", "Transitions": [{"StorageClass": "GLACIER"}]},
        {"ID": "warm", "Status": "Enabled", "Filter": {}, "Transitions": [{"StorageClass": "STANDARD_IA"}]},
        {"Status": "Enabled", "Filter": {"And": {"Prefix": "x", "Tags": []}}, "NoncurrentVersionExpiration": {}},
        {"Status": "Enabled", "Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {}},
    ]
    assert enabled_rules({"Rules": rules}) == [
        LifecycleRule("all", "", deletes=True),
        LifecycleRule("old form", "data/", archive_class="GLACIER"),
        LifecycleRule("warm", ""),
        LifecycleRule("", "x", is_partial=True, deletes_versions=True),
        LifecycleRule("", ""),
        LifecycleRule("", "", aborts_uploads=True),
    ]
    assert enabled_rules({}) == []


def test_the_limits_of_a_tier_count_as_those_of_the_account() -> None:
    limits = {"max_storage": 100, "max_streams": 100, "max_memory": -1}
    used = {"storage": 95, "streams": 3}
    account = {**used, "limits": {}, "tiers": {"R3": {**used, "limits": limits}}}
    assert _limits(account).found == "R3 storage 95 of 100"
    assert _limits(account | {"tiers": None}).state == "ok"


def test_a_rule_counts_where_it_may_meet_keys_of_floe() -> None:
    found = {"": True, "data/": True, "data/site=a": True, "da": True, "logs/": False}
    assert {prefix: doctor.prefixes_overlap(prefix, "data/") for prefix in found} == found
