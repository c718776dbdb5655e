"""`floe demo`."""
