"""Advisories: documents about values that appear, fall silent, return and expire."""
