"""Decides which device holds which neurons, and counts the bytes and the time."""
