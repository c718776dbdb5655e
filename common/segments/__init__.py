"""Segments: values, names, files, and the store that keeps them."""
