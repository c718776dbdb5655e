"""Restore a lost stream from the archive exactly: sequences, times, bytes, configuration and consumers."""
