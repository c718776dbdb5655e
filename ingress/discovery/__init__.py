"""How ingress learns that there is something new in the store."""
