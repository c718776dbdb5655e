"""What makes a program a service: its health, the pages that show it, signals, threads."""
