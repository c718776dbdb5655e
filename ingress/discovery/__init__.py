"""Discovery of changes in the store: polls, notifications, heartbeats."""
