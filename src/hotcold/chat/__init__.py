"""Converts messages to a prompt, and an answer's text to content, thinking and tool calls."""
