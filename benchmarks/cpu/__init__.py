"""Speed on a processor, beside llama.cpp and between builds."""
