"""HighwayHash-64 in columns: the vectors of the reference; a value has the same hash alone and beside others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingress.recovery.files_form import hash_of, highwayhash64

KEY = bytes(range(32))
# google/highwayhash: of the values 00, 00 01, … up to 35 bytes, from the empty one on.
VECTORS = """
907A56DE22C26E53 7EAB43AAC7CDDD78 B8D0569AB0B53D62 5C6BEFAB8A463D80 F205A46893007EDA 2B8A1668E4A94541
BD4CCC325BEFCA6F 4D02AE1738F59482 E1205108E55F3171 32D2644EC77A1584 F6E10ACDB103A90B C3BBF4615B415C15
243CC2040063FA9C A89A58CE65E641FF 24B031A348455A23 40793F86A449F33B CFAB3489F97EB832 19FE67D2C8C5C0E2
04DD90A69C565CC2 75D9518E2371C504 38AD9B1141D3DD16 0264432CCD8A70E0 A9DB5A6288683390 D7B05492003F028C
205F615AEA59E51E EEE0C89621052884 1BFC1A93A7284F4F 512175B5B70DA91D F71F8976A0A2C639 AE093FEF1F84E3E7
22CA92B01161860F 9FC7007CCF035A68 A0C964D9ECD580FC 2C90F73CA03181FC 185CF84E5691EB9E 4FC1F5EF2752AA9B
"""


def all_at_once(key: bytes, values: list[bytes]) -> list[int]:
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int64)
    return [int(found) for found in highwayhash64(key, b"".join(values), offsets)]


def alone(key: bytes, value: bytes) -> int:
    return int.from_bytes(hash_of(key, value), "little")


def test_the_vectors_of_the_reference() -> None:
    values = [bytes(range(size)) for size in range(36)]
    expected = [int(vector, 16) for vector in VECTORS.split()]

    assert (all_at_once(KEY, values), [alone(KEY, value) for value in values]) == (expected, expected)
    assert alone(KEY, bytes(range(150))) == 0xF1E354D0B6819BB8  # several packets, by the reference written out by hand


@given(st.binary(min_size=32, max_size=32), st.lists(st.binary(max_size=150), max_size=20))
def test_values_of_any_sizes_beside_each_other(key: bytes, values: list[bytes]) -> None:
    assert all_at_once(key, values) == [alone(key, value) for value in values]


def test_more_values_than_one_group_holds() -> None:
    values = [b"%d" % number * (number % 23) for number in range(9000)]
    found = all_at_once(KEY, values)

    assert [found[index] for index in range(0, 9000, 100)] == [alone(KEY, value) for value in values[::100]]
