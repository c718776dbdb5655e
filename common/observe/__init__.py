"""Observation: the health of a process, its coverage, its pages, and the state of each chain as any view shows it."""
