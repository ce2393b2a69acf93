"""Perplexity and greedy tokens, beside llama.cpp and the evaluation harness."""
