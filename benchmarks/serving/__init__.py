"""Measures what the server costs and bears."""
