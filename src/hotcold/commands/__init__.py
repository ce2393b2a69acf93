"""Parses a command, calls, and prints; one file per verb."""
