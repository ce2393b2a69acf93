"""Activation sparsity: predictors and the FFN that computes only the neurons that fire."""
