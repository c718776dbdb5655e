"""Real nats-server and S3 servers on loopback, for the demo, tests and bench."""
