"""What a user tunes: one frozen model for each section of the configuration, attribute names as the keys."""
