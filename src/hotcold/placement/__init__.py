"""What lies where, and what that costs: bytes, hardware, solver, placements, profiles."""
