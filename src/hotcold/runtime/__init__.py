"""Opens a model file and makes a session that can run a step."""
