"""Serves HTTP; ``protocol`` translates what clients send and receive.

The model runs in a process of its own (``api/async_llm.py``)."""
