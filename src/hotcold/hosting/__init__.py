"""Runs an engine in its own process, and communicates with it."""
