"""From other replicators' configuration files to Floe's."""
