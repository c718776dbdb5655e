"""Merges levels of segments, proves the merge, deletes what it replaces."""
