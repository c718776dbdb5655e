"""Observation of a process: its health, its coverage, and the pages that show them."""
