"""Predicts which neurons a token needs, and computes an FFN of only those."""
