"""FFNs of a layer: a class for each kind, with its weights and its ops in a step."""
