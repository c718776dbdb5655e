"""Melts segments back, in sequence and once, into target streams."""
