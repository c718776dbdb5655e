"""Several processes of one egress, with a parent that starts, watches and shows them."""
