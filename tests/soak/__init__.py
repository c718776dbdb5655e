"""The fault runs at the length that the promises name (`make soak`)."""
