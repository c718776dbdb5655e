"""Tells who was seen when: documents about values that appear, fall silent and come back."""
