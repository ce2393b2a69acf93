"""Runs child processes that may be killed, and passes plain data to and from them."""
