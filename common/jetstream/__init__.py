"""NATS and JetStream: raw messages in, validated raw frames out, state and leases."""
