"""What a user tunes: a frozen model for each section of the configuration, its attributes the keys."""
