"""The HTTP server: routes, security, streaming, lifecycle. What it says is in ``protocol``; the model runs in
a process of its own (``api/async_llm.py``)."""
