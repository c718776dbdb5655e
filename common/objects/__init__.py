"""The object store port and its two implementations."""
