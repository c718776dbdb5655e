"""Sampling: the choice of the messages of a feed that are kept, and the state of their keys."""
