"""Several processes of one egress: a parent that starts, watches and shows them."""
