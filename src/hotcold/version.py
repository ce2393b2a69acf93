"""The version of the package. Any layer may import it."""

__version__ = "0.1.0"
