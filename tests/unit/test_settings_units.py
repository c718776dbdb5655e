"""Durations, sizes, times and addresses, both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import parse_time
from common.settings.types import format_duration, format_size, parse_duration, parse_listen, parse_size


def test_a_duration_is_a_sum_of_numbers_with_units():
    given = {"500ms": 0.5, "5s": 5.0, "5m": 300.0, "1h30m": 5400.0, "1.5h": 5400.0, "7d": 604800.0, "1w": 604800.0}
    assert {text: parse_duration(text) for text in given} == given
    assert parse_duration("0s") == 0


@pytest.mark.parametrize(
    "text", ["", "5", "-5s", "5 minutes", "5 m", "1e99h", "NaN", "inf", "5M", "5y", "s", "5s ", "٥s", "1h-5m"]
)
def test_other_texts_are_no_durations_and_the_message_shows_the_form(text: str):
    with pytest.raises(ValueError, match="expected a duration such as 500ms 5s 5m 1h30m 7d 1w, found"):
        parse_duration(text)


def test_a_duration_over_a_century_is_refused():
    with pytest.raises(ValueError, match="expected at most 5214w2d, found '999999d'"):
        parse_duration("999999d")


@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back_to_the_millisecond(milliseconds: int):
    assert round(parse_duration(format_duration(milliseconds / 1000)) * 1000) == milliseconds


def test_sizes_are_binary_as_nats_writes_them():
    given = {"0": 0, "1000": 1000, "64K": 65536, "64KB": 65536, "64KiB": 65536, "100M": 100 << 20, "1.5G": 3 << 29}
    given |= {"4G": 4 << 30, "2T": 2 << 40, "10B": 10}
    assert {text: parse_size(text) for text in given} == given


@pytest.mark.parametrize("text", ["", "-1", "1k", "5X", "5iB", "1e3", "NaN", "K", "1 M", "99999999P"])
def test_other_texts_are_no_sizes(text: str):
    with pytest.raises(ValueError, match="expected a size such as 64K 100M 4G"):
        parse_size(text)


@given(st.integers(0, 2**63 - 1))
def test_a_formatted_size_reads_back(size: int):
    assert parse_size(format_size(size)) == size


def test_a_time_is_exact_to_the_nanosecond():
    assert parse_time("1970-01-01T00:00:01.000000001Z") == 1_000_000_001
    assert parse_time("2026-01-02T03:04:05+01:00") == parse_time("2026-01-02T02:04:05Z")
    assert parse_time("1969-12-31T23:59:59.5Z") == -500_000_000


@pytest.mark.parametrize("text", ["2026-01-02T03:04:05", "2026-01-02", "2026-02-30T00:00:00Z", "now", "1700000000"])
def test_a_time_without_zone_or_off_the_calendar_is_refused(text: str):
    with pytest.raises(ValueError, match="expected a time with its zone such as 2026-01-02T03:04:05Z"):
        parse_time(text)


def test_an_address_is_host_and_port():
    given = {"127.0.0.1:9464": ("127.0.0.1", 9464), "[::1]:0": ("::1", 0), "localhost:80": ("localhost", 80)}
    given |= {":9464": ("0.0.0.0", 9464), "": None}
    assert {text: parse_listen(text) for text in given} == given


@pytest.mark.parametrize("text", ["9464", "127.0.0.1", "127.0.0.1:70000", "::1:9464", "a b:1", "host:port", "h:-1"])
def test_other_texts_are_no_addresses(text: str):
    with pytest.raises(ValueError, match=r"expected an address such as 127\.0\.0\.1:9464"):
        parse_listen(text)
