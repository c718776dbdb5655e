"""Replay of segments into target streams, in sequence and exactly once."""
