"""Mix positions: attention, and layers with a state."""
