"""Decides which tokens an answer may have next, so that it matches a grammar."""
