"""Implements a plain dense language model: configuration, weights, layers, KV cache."""
