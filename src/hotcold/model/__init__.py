"""A plain dense language model: configuration, weights, layers, KV cache."""
