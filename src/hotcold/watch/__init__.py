"""Shows which neurons are active for a watched request."""
