"""The partitions of a feed together: how an incarnation is closed, and how the next one is cut."""
