"""Translates between plain data and the engine: JSON values of clients to jobs, pieces of text to JSON
values. It has no HTTP and no event loop."""
