"""Simulation of the promises: real services over a simulated server, store and network (docs/design/)."""
