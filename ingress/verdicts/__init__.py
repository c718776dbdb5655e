"""What a target says, compared with what is stored of it."""
