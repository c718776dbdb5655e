"""Components that make a program a service: signals, threads and progress."""
