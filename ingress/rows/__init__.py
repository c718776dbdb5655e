"""From segments to messages that may be published."""
