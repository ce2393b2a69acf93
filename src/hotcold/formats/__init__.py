"""Turns bytes into arrays and back: GGUF files and block-quantised tensors."""
