"""What surrounds Floe: local servers, the demo, a fleet emulator, deployments."""
