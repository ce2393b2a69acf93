"""The Python interface: ``LLM`` in this process and ``AsyncLLM`` over a process of its own."""
