"""Which messages of a feed are kept, and what is known about their senders."""
