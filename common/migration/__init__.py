"""Conversion of other replicators' configuration files to Floe's."""
