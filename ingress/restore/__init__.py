"""Brings a lost stream back from the archive as it was: sequences, times, bytes, configuration and consumers."""
