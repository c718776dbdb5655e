"""Rows to the target: three ways of publishing, and what the answers are worth."""
