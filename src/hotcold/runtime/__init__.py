"""From a model file to a session that can run a step."""
