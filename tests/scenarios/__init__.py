"""The fault runs: each takes its length as an argument, short in `make test`, long in `make soak`."""
