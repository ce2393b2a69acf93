"""Finds, downloads and caches models of the Hugging Face hub."""
