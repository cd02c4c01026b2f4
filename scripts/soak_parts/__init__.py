"""The parts of scripts/soak.py: a server process, its clients, and the book that is kept of both."""
