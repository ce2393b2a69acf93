"""Contestants, models, builds, machine and reports that several benchmarks share."""
