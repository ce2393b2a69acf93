"""Turns text into tokens and back."""
