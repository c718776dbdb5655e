"""Messages that are too large for a target: put aside, listed, tried again."""
