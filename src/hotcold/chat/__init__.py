"""Turns messages into a prompt, and an answer's text into content, thinking and tool calls."""
