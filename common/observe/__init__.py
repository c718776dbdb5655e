"""Observation of a process: its health, its coverage, and the pages and log lines that show them."""
