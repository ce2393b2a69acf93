"""Rewrites GGUF files: other block types, other layouts, predictors in or out."""
