"""Components that make a program a service: its health, the pages that show it, signals, threads."""
