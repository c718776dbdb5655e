"""Freeze JetStream streams at a site into ordered segments."""
