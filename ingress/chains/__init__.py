"""What flows into a target: which chains, from where, in which turns."""
