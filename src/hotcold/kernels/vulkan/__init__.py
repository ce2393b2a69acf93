"""The ``vulkan`` backend: compute shaders on a GPU, by any vendor's driver. backend.py is on top."""
