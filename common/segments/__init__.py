"""Segments: values, names, files, and their store."""
