"""Shows which neurons fire for a request that somebody watches."""
