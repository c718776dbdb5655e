"""Views and decisions of an operator: status, corrections, gaps, pauses, parked messages."""
