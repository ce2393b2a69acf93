"""``LLM`` and ``AsyncLLM``, the interface for Python programs."""
