"""Child processes that may be killed, and plain data to and from them; knows no model."""
