"""The ``vulkan`` backend: compute shaders on a GPU, with any vendor's driver. Start at backend.py."""
