"""The HTTP server; ``protocol`` translates requests and replies.

The model runs in its own process (``api/async_llm.py``)."""
