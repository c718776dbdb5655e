"""Replay archived messages into any stream: after a disaster, for a test, for a drill."""
