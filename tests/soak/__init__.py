"""Fault runs at the full length that Floe's promises state (`make soak`)."""
