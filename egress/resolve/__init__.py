"""Decisions of an operator about a chain that stopped."""
