"""Offers ``LLM`` and ``AsyncLLM`` to Python programs."""
