"""What an operator looks at and decides: status, corrections, gaps, pauses, parked messages."""
