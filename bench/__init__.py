"""Benchmarks of speed and memory, each beside a floor measured in the same run (`make bench`, `ONLY=prefix`)."""
