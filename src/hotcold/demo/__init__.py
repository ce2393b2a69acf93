"""The built-in model, so that the first command needs no download."""
