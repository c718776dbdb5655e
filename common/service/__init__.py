"""What makes a program a service: configuration, logs, metrics, health, shutdown."""
