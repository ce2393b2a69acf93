"""Trains predictors and sparse models with torch."""
