"""Runs an engine in a process of its own, and talks to it."""
