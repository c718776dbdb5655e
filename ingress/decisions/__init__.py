"""What operators decide about single chains: gaps, pauses; and the commands for it."""
