"""Bytes to arrays and back: GGUF files and block-quantised tensors. Knows no neural network."""
