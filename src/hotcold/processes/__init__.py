"""Child processes that can be killed, and plain data to and from them."""
