"""Tools and files around Floe: local servers, the demo, a fleet emulator, deployments."""
