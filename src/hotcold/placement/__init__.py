"""Division of a model between devices: which neurons are where, and the bytes and the time of that."""
