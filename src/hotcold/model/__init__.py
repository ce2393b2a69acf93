"""A plain dense language model: configuration, weights, KV cache, tokenizer. Knows no sparsity."""
