"""Checkpoints of other tools to GGUF; the only place with Hugging Face names."""
