"""Takes requests and returns tokens: scheduling, batches, sampling, the text of tokens."""
