"""Requests in, tokens out: scheduling, batches, sampling, and the text of tokens."""
