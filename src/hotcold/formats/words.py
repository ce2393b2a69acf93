"""Names and bounds in model files, shared by the code that writes, reads and computes models."""

#: ``gelu`` is the tanh form, as in ggml; ``gelu_erf`` is the exact form, PyTorch's default. ``swiglu_oai``
#: (gpt-oss; ggml's name) is ``g sigmoid(alpha g) (u + 1)`` with ``g = min(gate, limit)`` and u, which is up
#: clamped to +-limit.
ACTIVATIONS = ("relu", "drelu", "relu2", "silu", "gelu", "gelu_erf", "swiglu_oai")
#: A row of the stored down matrix belongs to a neuron, or to an output.
DOWN_LAYOUTS = ("by_neuron", "by_output")
MAX_EXPERTS = 1024  #: of a layer
#: A key of a file: each expert's neurons are ordered by activity, the most active first.
HOT_FIRST_KEY = "hotcold.ffn.hot_first"

#: A tensor with this name interleaves the rows of several, so that one read has a row of each; the key lists
#: their names.
SIDE_BY_SIDE, SIDE_BY_SIDE_KEY = "ffn_side_by_side_exps", "hotcold.ffn.side_by_side"
