"""Compaction: merge segments into higher levels, prove each merge, delete the segments that it replaces."""
