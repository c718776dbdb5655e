"""Decoding of segments into messages that may be published."""
