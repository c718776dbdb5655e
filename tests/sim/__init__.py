"""The promises in simulated time: real services over a simulated server, store and network (docs/architecture.md)."""
