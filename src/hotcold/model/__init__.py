"""Implements a plain dense language model: configuration, weights, KV cache, tokenizer."""
