"""Translates plain data: clients' JSON values to jobs, and pieces of text to JSON values. Knows no HTTP and
no event loop."""
