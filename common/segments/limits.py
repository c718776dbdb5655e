"""How much of an untrusted segment file is read into memory before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20

# What the writer puts into one row group: raw bytes, which bound the memory of whoever reads it.
ROW_GROUP_BYTES_LEVEL_0 = 32 * MIB
ROW_GROUP_BYTES_MERGED = 128 * MIB
# The columns of a row that are not raw bytes: so that a million empty messages are not one row group.
ROW_OVERHEAD_BYTES = 64
# nats-server's own limit of max_payload; one message is never split over row groups.
MAX_MESSAGE_BYTES = 64 * MIB


def row_group_bytes(level: int) -> int:
    """The raw bytes at which the writer closes a row group of a segment of `level`."""
    return ROW_GROUP_BYTES_LEVEL_0 if level == 0 else ROW_GROUP_BYTES_MERGED


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one file; a file beyond any of them is refused as corrupt, code E-SEG-BOMB.

    `footer_bytes`: stored size of the Parquet metadata. `row_groups`, `columns`: their number.
    `footer_value_bytes`: one string in the metadata, Floe's own footer included. `metadata_values`: numbers,
    strings and lists in the metadata. `row_group_bytes`: decoded bytes of one row group, of one page and of
    one dictionary; a row group as the writer makes it, with the largest message on top, fits.
    `page_header_bytes`: one page header. `batch_bytes`, `batch_rows`: what one batch aims at; a large
    message, or rows of very uneven size, make it larger, but never larger than a row group.
    """

    footer_bytes: int = 8 * MIB
    row_groups: int = 1024
    columns: int = 64
    footer_value_bytes: int = MIB
    metadata_values: int = 500_000
    row_group_bytes: int = ROW_GROUP_BYTES_MERGED + MAX_MESSAGE_BYTES + 64 * MIB
    page_header_bytes: int = 64 * 1024
    batch_bytes: int = 8 * MIB
    batch_rows: int = 16_384


DEFAULT_LIMITS = Limits()
