"""Requests in, tokens out: scheduling, sampling, loading."""
