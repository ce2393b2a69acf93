"""Mixers of positions: attention, and layers with a state."""
