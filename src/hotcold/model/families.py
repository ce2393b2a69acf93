"""Model families as data: what a GGUF file implies by its architecture's name and does not state.

What a file does state (biases, gating, q/k norms, fused q/k/v, a tied head, shapes) is read from the file. A
new family is an entry here, and its layout in ``convert/``; nothing else asks for a family by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    name: str  #: GGUF's ``general.architecture``
    activation: str = "silu"  #: of the FFN, where an ordinary GGUF file has no ``hotcold.ffn.activation``
    powerinfer_activation: str = "relu"  #: of PowerInfer's files (magic ``PWRI``), whose models are ReLU-fied
    norm: str = "rms"  #: RMSNorm, or ``layer``: LayerNorm
    rope_interleaved: bool = False  #: rotary pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)
    parallel: bool = False  #: attention and FFN both read the layer's input, not one after the other


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", rope_interleaved=True),  # Llama 2 and 3, Mistral
        Family("bamboo", activation="drelu", powerinfer_activation="drelu", rope_interleaved=True),
        Family("qwen2"),
        Family("qwen3"),
        Family("falcon", activation="gelu", norm="layer", parallel=True),
    )
}
