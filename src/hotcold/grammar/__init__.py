"""Decides which tokens an answer may have next, so that the whole matches."""
