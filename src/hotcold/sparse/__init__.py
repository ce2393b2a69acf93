"""Activation sparsity: which neurons a token needs, and an FFN that computes only those."""
