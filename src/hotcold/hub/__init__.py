"""Models of the Hugging Face hub: their names, downloads and cache."""
