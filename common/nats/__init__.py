"""Access to NATS and JetStream: raw messages, streams and consumers, key-value state, and leases."""
