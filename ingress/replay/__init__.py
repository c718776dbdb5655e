"""Replays what the archive holds into any stream: after a disaster, for a test, for a drill."""
