"""A model's shape and arithmetic, read from untrusted GGUF metadata."""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hotcold.formats.gguf import TensorInfo
from hotcold.formats.words import ACTIVATIONS, DOWN_LAYOUTS
from hotcold.kernels.backend import SPARSE_ACTIVATIONS
from hotcold.kernels.checks import check_activation
from hotcold.model.families import FAMILIES, Every, Family, Scales
from hotcold.model.ffn.experts import Experts, dense_layers, ffn_names, layer_neurons, read_experts
from hotcold.model.ffn.gate_cut import cut_buffer_shapes, read_cuts
from hotcold.model.ffn.normed import NormedShape, read_activation, read_normed
from hotcold.model.hidden_input import hidden_buffer_shapes
from hotcold.model.keys import Keys, check_drafting, is_number, whole
from hotcold.model.keys import ModelError as ModelError
from hotcold.model.known_keys import ReadKeys
from hotcold.model.layer_inputs import input_buffer_shapes, read_width
from hotcold.model.mixers.attention import AttentionShape
from hotcold.model.mixers.gated_delta import read_gated_delta
from hotcold.model.mixers.kimi_delta import read_kimi_delta
from hotcold.model.mixers.latent_attention import index_limit, read_latent
from hotcold.model.mixers.mamba import read_mamba
from hotcold.model.mixers.mixer import NO_MIXER, MixerShape, ParallelMixers
from hotcold.model.mixers.positions import LayerPositions, local_head_dim, read_positions, scaling_notes
from hotcold.model.mixers.rope import Growth, Rope
from hotcold.model.mixers.rwkv import read_rwkv
from hotcold.model.mixers.short_conv import read_short_conv
from hotcold.model.refused import refusal
from hotcold.model.streams import read_streams, stream_buffer_shapes
from hotcold.model.whole_down import whole_downs
from hotcold.values import shown

#: Limits above those of any model: a file beyond them is damaged, and is refused before any allocation.
MAX_LAYERS, MAX_DIM, MAX_HEADS, MAX_HEAD_DIM = 1024, 1 << 17, 4096, 1024
MAX_NEURONS, MAX_VOCAB, MAX_CONTEXT = 1 << 20, 1 << 24, 1 << 24

#: Reason that a model's context is shorter than it was trained for.
_INDEXED = "beyond this length layers choose positions by an index, which is not supported"

#: A tensor of each FFN without fused experts, and the tensors that show that it has a gate.
_UP, _GATES = (
    re.compile(r"blk\.(\d{1,9})\.ffn_(gate_)?up(_exps)?\.weight"),
    ("gate", "gate_exps", "gate_up_exps"),
)


#: A tensor whose first dimension is the rank of all tensors of its kind.
_LAUREL = "blk.0.laurel_l.weight"


@dataclass(frozen=True)
class Config:
    """Shapes and facts of a model: D ``dim``, V ``vocab``."""

    family: Family
    layers: int
    dim: int
    mixers: tuple[MixerShape, ...]  #: of each layer; NO_MIXER in a layer with only an FFN
    neurons: tuple[int, ...]  #: N of each layer; 0 in a layer with only a mixer
    vocab: int
    context: int  #: positions that the model was trained for, or that it may have here
    norm_eps: float
    activation: str
    threshold: float | tuple[float, ...]  #: of active gates (FATReLU); one for all layers, or one each
    gated: bool
    down_layout: str  #: of ``ffn_down``: ``by_output`` (D, N), or ``by_neuron`` as ``ffn_down_t`` always is
    scales: Scales = field(default_factory=Scales)
    softcap: float | None = None  #: of logits
    experts: Experts | None = None  #: of layers; ``neurons`` are those of all experts
    dense_layers: frozenset[int] = frozenset()  #: layers without experts in a model with experts
    layer_input: int = 0  #: values per token that each layer gets (Gemma 4); 0: none
    streams: int = 1  #: residual streams
    laurel: int = 0  #: rank of the matrices parallel to attention; 0: none
    #: by layer: a gate is cut unless it is this many deviations above the mean; None: no cut
    cuts: tuple[float | None, ...] = ()
    #: each layer's FFN if its neurons are normalised before down; ``neurons`` are 0 then
    normed: tuple[NormedShape, ...] = ()
    #: by layer: block type of down if all neurons are added, active or not; else ""
    whole_downs: tuple[str, ...] = ()
    drafting: int = 0  #: blocks after the last layer, which only draft tokens
    draft: "Config | None" = None  #: the drafting block that is used, as a model of one layer
    reads_hidden: bool = False  #: a draft block, which reads another model's hidden rows
    context_limit: str = ""  #: why ``context`` is less than the model was trained for
    notes: tuple[str, ...] = ()  #: notes for the user, a line each

    @property
    def architecture(self) -> str:
        return self.family.name

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotations of the layers."""
        return tuple(dict.fromkeys(rope for mixer in self.mixers for rope in mixer.ropes))

    @property
    def buffers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and row shapes of the buffers (:meth:`DeviceBuffers.buffer`) that blocks share."""
        mixers = [buffer for mixer in self.mixers for buffer in mixer.buffers.items()]
        experts = self.experts.buffers(self.dim) if self.experts else {}
        inputs = input_buffer_shapes(self.layers, self.layer_input) if self.layer_input else {}
        streams = stream_buffer_shapes(self.streams, self.dim, self.laurel) if self.streams > 1 else {}
        cut = {self.neurons[i] for i in range(self.layers) if self.cut_of(i) is not None}
        gates = [buffer for neurons in cut for buffer in cut_buffer_shapes(neurons).items()]
        gates += [buffer for each in self.normed for buffer in each.buffers.items()]
        parts = (experts, inputs, streams, hidden_buffer_shapes(self.dim) if self.reads_hidden else {})
        return tuple(dict.fromkeys([*mixers, *(buffer for part in parts for buffer in part.items()), *gates]))

    def cut_of(self, layer: int) -> float | None:
        """Returns the cut of a layer's gates in deviations above their mean; None: no cut."""
        return self.cuts[layer] if self.cuts else None

    @property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes by layer of matrices that loading computes instead of reading from the file."""
        s = self.streams
        rows = (s * s + s + 1) * (s + 1) * self.dim if s > 1 else 0
        cut = (0 if self.cut_of(i) is None else 4 * self.neurons[i] for i in range(self.layers))
        return tuple(4 * (rows + each) for each in cut)

    @property
    def whole(self) -> str | None:
        """Reason that neurons cannot be skipped, else None. Exceptions: cut gates, up rows before a norm."""
        if self.activation not in SPARSE_ACTIVATIONS:
            return f"activation {self.activation} gives no zeros"
        return "a norm before down needs all neurons of a token" if self.normed else None

    @property
    def skips(self) -> tuple[bool, ...]:
        """True if each layer's activation gives zeros, so that neurons may be skipped."""
        return tuple(self.activation_of(i) in SPARSE_ACTIVATIONS for i in range(self.layers))

    def activation_of(self, layer: int) -> str:
        """Returns the activation of a layer's FFN op: ReLU after cut gates, which include the family's."""
        return self.activation if self.cut_of(layer) is None else "relu"

    def threshold_of(self, layer: int) -> float:
        """Returns the threshold of a layer's gates. A draft block has that of the last layer."""
        if isinstance(self.threshold, tuple):
            return self.threshold[min(layer, len(self.threshold) - 1)]
        return self.threshold

    def page_bytes(self, cache_type: str) -> int:
        """Returns bytes of a page in all layers and :attr:`draft`. ModelError: blocks do not fit heads."""
        of_draft = self.draft.page_bytes(cache_type) if self.draft else 0
        return of_draft + sum(mixer.page_bytes(cache_type) for mixer in self.mixers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all layers: the state of a sequence outside pages; 0 without any."""
        return sum(mixer.slot_bytes for mixer in self.mixers)

    def experts_of(self, layer: int) -> Experts | None:
        """Returns a layer's experts; None without experts."""
        if self.experts is None or layer in self.dense_layers or not self.neurons[layer]:
            return None
        return self.experts.of(layer)

    def _down(self, layer: int, present: Container[str]) -> str:
        """Returns the name of a layer's down; "" without neurons."""
        blk = f"blk.{layer}."
        name = "ffn_down_exps" if self.experts_of(layer) else ffn_names(blk, present)[1]
        return f"{blk}{name}.weight" if self.neurons[layer] else ""

    def chosen_of(self, layer: int) -> int:
        """Returns the experts that a row of a layer may choose; 0 in a model without experts."""
        experts = self.experts_of(layer) or self.experts
        return experts.chosen if experts else 0

    def ffn_width(self, layer: int) -> int:
        """Returns the width of the neurons' input: D, or less with latent experts."""
        experts = self.experts_of(layer)
        return experts.latent or self.dim if experts else self.dim

    @property
    def state_ops(self) -> tuple[str, ...]:
        """Ops that mixers and FFNs use, and that some backends lack."""
        parts: list[MixerShape | NormedShape] = [*self.mixers, *self.normed]
        return tuple(dict.fromkeys(op for part in parts for op in part.ops))

    @property
    def branches(self) -> bool:
        """True if outputs of attention and FFN are normalised or scaled before they are added."""
        return self.family.norms != "before" or self.scales.residual != 1

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], magic: str, tensors: Mapping[str, TensorInfo]
    ) -> Self:
        """Reads and checks a GGUF file's metadata. ``magic`` is ``PWRI`` for PowerInfer's files; ``tensors``
        show whether the FFN has a gate. ModelError names the key, the value, and the allowed values."""
        family = _family(metadata)
        metadata = read = ReadKeys(metadata, family)
        keys = Keys(metadata, family.name)
        layers = keys.whole("block_count", 1 + keys.drafting, MAX_LAYERS) - keys.drafting
        check_drafting(keys, layers, tensors)
        dim = keys.whole("embedding_length", 1, MAX_DIM)
        heads = _heads(keys, family, dim, layers)
        context = _context(keys, family, tensors)
        scales = _scales(keys, family, family.scales(layers, dim, heads[0]))
        gated = family.fused_gate or _gated(tensors)
        experts = read_experts(keys, family, layers, MAX_NEURONS, tensors)
        dense = dense_layers(keys, layers) if experts else frozenset()
        neurons = layer_neurons(keys, family, layers, experts, dense, MAX_NEURONS)
        activation, threshold, drafts = _ffn(keys, family, magic, gated, layers)
        if family.streams and activation != family.activation:
            raise ModelError(
                f"hotcold.ffn.activation is {activation}: {family.name} needs {family.activation}"
            )
        eps = _eps(keys, family)
        notes = drafts + (scaling_notes(keys) if family.learned_positions is None else ())
        down_layout = Keys(metadata, "hotcold").choice(
            "ffn.down_layout", DOWN_LAYOUTS, _implied_layout(tensors)
        )
        mixers = _mixers(keys, family, layers, heads, context, scales, neurons)
        limit = ""
        most = index_limit(keys) if family.latent else None
        if most is not None and most < context:
            context, limit = most, _INDEXED
            notes = (*notes, f"the context is at most {context} positions: {limit}")
        config = cls(
            family=family,
            layers=layers,
            dim=dim,
            mixers=mixers,
            neurons=(0,) * layers if family.norms_inside else neurons,
            vocab=_vocab(metadata, tensors),
            context=context,
            context_limit=limit,
            norm_eps=eps,
            activation=activation,
            threshold=threshold,
            gated=gated,
            down_layout=down_layout,
            scales=scales,
            softcap=keys.factor("final_logit_softcapping", 0.0) or None,
            experts=experts,
            dense_layers=dense,
            layer_input=read_width(keys),
            streams=read_streams(keys, any=family.streams),
            laurel=tensors[_LAUREL].shape[0] if family.streams and _LAUREL in tensors else 0,
            cuts=read_cuts(keys, layers, any=family.streams),
            normed=read_normed(neurons, activation, down_layout) if family.norms_inside else (),
            drafting=keys.drafting,
            notes=(*notes, *read.account(family.name)),
        )
        downs = [(config._down(i, tensors), config.activation_of(i)) for i in range(layers)]
        return replace(config, whole_downs=whole_downs(downs, down_layout, tensors))


def _family(metadata: Mapping[str, Any]) -> Family:
    name = metadata.get("general.architecture")
    if reason := refusal(name, metadata.get("general.type"), FAMILIES):
        raise ModelError(reason)
    return FAMILIES[str(name)]


def _gated(tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns whether the first layer with an FFN has a gate."""
    first = min((int(matched[1]) for name in tensors if (matched := _UP.fullmatch(name))), default=0)
    return any(f"blk.{first}.ffn_{part}.weight" in tensors for part in _GATES)


def _eps(keys: Keys, family: Family) -> float:
    """Reads the norms' epsilon; Nemotron-H has LayerNorm's key for its RMSNorms."""
    rms, layer = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    uses_layer_key = family.one_part and rms not in keys
    return keys.number(layer if family.norm == "layer" or uses_layer_key else rms, 0, 0.1)


def _heads(keys: Keys, family: Family, dim: int, layers: int) -> tuple[int, int, int]:
    """Reads H, K and the head length of the layers with attention; zeros without attention."""
    none = family.stateful is not None
    heads = keys.alike("attention.head_count", 1 - none, MAX_HEADS, layers, none=none)
    if not heads or family.latent:
        return heads, 0, 0
    if family.kinds_of_heads:
        kv_heads = keys.per_layer("attention.head_count_kv", 1, MAX_HEADS, layers, default=heads)[0]
    else:
        kv_heads = keys.alike(
            "attention.head_count_kv", 1 - none, MAX_HEADS, layers, default=heads, none=none
        )
    if not kv_heads:
        return 0, 0, 0
    if heads % kv_heads:
        key = keys.name("attention.head_count_kv")
        raise ModelError(f"{key} is {kv_heads}: it must divide {heads} heads")
    if keys.get("attention.key_length") is None and dim % heads:
        raise ModelError(f"{keys.name('attention.head_count')} is {heads}: it must divide {dim} dimensions")
    head_dim = keys.whole("attention.key_length", 1, MAX_HEAD_DIM, default=dim // heads)
    if keys.whole("attention.value_length", 1, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise ModelError(f"{keys.name('attention.value_length')} differs from the keys' length {head_dim}")
    return heads, kv_heads, head_dim


def _mixers(
    keys: Keys,
    family: Family,
    layers: int,
    heads: tuple[int, int, int],
    context: int,
    scales: Scales,
    neurons: Sequence[int],
) -> tuple[MixerShape, ...]:
    """Reads each layer's mixer; ``heads`` are those of :func:`_heads`."""
    attention: Sequence[MixerShape] = (NO_MIXER,) * layers
    if family.latent:
        attention = (read_latent(keys, family, layers, context, scales.attention),) * layers
    elif heads[0]:
        attention = _attention(keys, family, layers, heads, context, scales)
    if family.stateful is None:
        return tuple(attention)
    readers: dict[str, Callable[[], MixerShape]] = {
        "short_conv": lambda: read_short_conv(keys, keys.whole("embedding_length", 1, MAX_DIM)),
        "gated_delta": lambda: read_gated_delta(keys, tiled=family.tiled_heads),
        "kimi_delta": lambda: read_kimi_delta(keys, layers),
        "mamba": lambda: read_mamba(keys),
        "rwkv": lambda: read_rwkv(keys, keys.whole("embedding_length", 1, MAX_DIM)),
    }
    stateful = readers[family.stateful]().of_layers(layers)
    if family.together:
        return tuple(ParallelMixers(pair) for pair in zip(attention, stateful, strict=True))
    attends = _layers_with_attention(keys, family, layers, bool(heads[0]))
    return tuple(
        NO_MIXER if family.one_part and n else mixer if attending else own
        for n, mixer, attending, own in zip(neurons, attention, attends, stateful, strict=True)
    )


def _layers_with_attention(keys: Keys, family: Family, layers: int, any_heads: bool) -> tuple[bool, ...]:
    """Returns whether each layer with a mixer has attention instead of a mixer with a state."""
    if not any_heads:
        return (False,) * layers
    if (period := "full_attention_interval") not in keys:
        counts = keys.per_layer("attention.head_count_kv", 0, MAX_HEADS, layers, default=1)
        return tuple(n > 0 for n in counts)
    if "attention.recurrent_layers" in keys:
        flags = keys.truths("attention.recurrent_layers", layers)
        return tuple(not flag for flag in flags)
    every = Every(keys.whole(period, 1, MAX_LAYERS))
    return tuple(i in every for i in range(layers))


def _attention(
    keys: Keys, family: Family, layers: int, heads: tuple[int, int, int], context: int, scales: Scales
) -> tuple[AttentionShape, ...]:
    """Reads each layer's attention; ``heads`` are those of :func:`_heads`."""
    head_dim = heads[-1]
    common = AttentionShape(
        *heads,
        scale=scales.attention or 1 / math.sqrt(head_dim),
        softcap=keys.factor("attn_logit_softcapping", 0.0) or None,
        qk_norm=family.qk_norm,
        rotated_norms=family.rotated_norms,
        gated=family.gated_attention,
        norm_values=family.kinds_of_heads,
        norm_output=family.norms_inside,
    )
    positions = read_positions(keys, family, layers, head_dim, context)
    growth = _growth(keys, family, positions, head_dim)
    unless = family.plain_norms_unless
    plain = unless is not None and keys.get("expert_count", 0) != unless
    shapes = [
        replace(
            common,
            rope=position.rope,
            window=position.window,
            growth=None if family.temperature and position.rope else growth,
            plain_norms=plain and position.rope is not None,
            chunked=family.chunked,
        )
        for position in positions
    ]
    if not family.kinds_of_heads:
        return tuple(shapes)
    windowed, local = [position.windowed for position in positions], local_head_dim(keys, family, head_dim)
    return _of_kinds(keys, shapes, windowed, local, needed=family.streams)


def _of_kinds(
    keys: Keys, shapes: Sequence[AttentionShape], windowed: Sequence[bool], local: int, *, needed: bool
) -> tuple[AttentionShape, ...]:
    """Sets kv heads and head lengths by layer; layers with a window have the length ``local``. The last
    layers share pages with the last earlier layer of their kind. ``needed``: a file must name them."""
    layers, heads, key = len(shapes), shapes[0].heads, "attention.shared_kv_layers"
    counts = keys.per_layer("attention.head_count_kv", 1, MAX_HEADS, layers, default=heads)
    if wrong := [n for n in counts if heads % n]:
        raise ModelError(
            f"{keys.name('attention.head_count_kv')} is {wrong[0]}: it must divide {heads} heads"
        )
    with_pages = layers - keys.whole(key, 0, layers - 1, default=None if needed else 0)
    finished: list[AttentionShape] = []
    for i, (shape, window, kv_heads) in enumerate(zip(shapes, windowed, counts, strict=True)):
        length = local if window else shape.head_dim
        if i < with_pages:
            finished.append(replace(shape, kv_heads=kv_heads, head_dim=length))
            continue
        source = next((j for j in reversed(range(with_pages)) if windowed[j] == window), None)
        if source is None:
            kind = "with a window" if window else "without one"
            got = f"{keys.name(key)} is {layers - with_pages}, and layer {i} is {kind}"
            raise ModelError(f"{got}: a layer like it is needed before layer {with_pages}")
        shared = finished[source]
        finished.append(replace(shape, kv_heads=shared.kv_heads, head_dim=length, pages_of=source))
    return tuple(finished)


def _growth(keys: Keys, family: Family, positions: Sequence[LayerPositions], head_dim: int) -> Growth | None:
    """Reads how scores grow with positions; None: not at all."""
    if family.temperature is not None:
        if head_dim % 2:  # the factors rotate pairs
            raise ModelError(f"{keys.name('attention.key_length')} is {head_dim}: an even number is needed")
        rate, after = family.temperature
        rate = keys.factor("attention.temperature_scale", rate)
        return Growth(rate, keys.whole("attention.temperature_length", 1, 1 << 24, default=after), before=1)
    if not (rate := keys.factor("attention.temperature_scale", 0.0)):
        return None
    if any(each.rope is None or each.rope.dim != head_dim for each in positions):
        got = f"{keys.name('attention.temperature_scale')} is {rate:g}"
        raise ModelError(f"{got}: it needs layers whose heads are rotated as a whole")
    original = "rope.scaling.original_context_length"
    length = "attention.temperature_length" if "attention.temperature_length" in keys else original
    return Growth(rate, keys.whole(length, 1, 1 << 24))


def _vocab(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """Returns the rows of the embedding table; the tokenizer must have as many tokens."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("tensor token_embd.weight is missing: this file has no model (only a vocabulary?)")
    vocab = whole("rows of token_embd.weight", table.shape[0], 1, MAX_VOCAB)
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    if hasattr(tokens, "__len__") and len(tokens) != vocab:
        got = f"tokenizer.ggml.tokens has {len(tokens)} tokens"
        raise ModelError(f"{got}: token_embd.weight has {vocab} rows")
    return vocab


def _context(keys: Keys, family: Family, tensors: Mapping[str, TensorInfo]) -> int:
    """Reads the number of positions, at most those of a learned table."""
    context, table = keys.whole("context_length", 1, MAX_CONTEXT), tensors.get("position_embd.weight")
    if family.learned_positions is None or table is None:
        return context
    unused = family.learned_positions
    rows = whole("rows of position_embd.weight", table.shape[0], unused + 1, 1 << 25)
    return min(context, rows - unused)


def _scales(keys: Keys, family: Family, implied: Scales) -> Scales:
    logits = keys.factor("logit_scale", implied.logits)
    return replace(
        implied,
        embedding=keys.factor("embedding_scale", implied.embedding),
        residual=keys.factor("residual_scale", implied.residual),
        logits=1 / logits if family.logits_multiplied else logits,
        attention=keys.factor("attention.scale", implied.attention or 0.0) or None,
    )


def _ffn(
    keys: Keys, family: Family, magic: str, gated: bool, layers: int
) -> tuple[str, float | tuple[float, ...], tuple[str, ...]]:
    """Reads activation, threshold and notes: from our own keys, else as the file's magic implies."""
    hotcold_keys = Keys(keys.metadata, "hotcold")
    notes: tuple[str, ...] = ()
    implied = family.activation
    if magic == "PWRI" and implied not in SPARSE_ACTIVATIONS:  # PowerInfer's models are ReLU-fied
        implied = "relu"
    if family.norms_inside and "ffn.activation" not in hotcold_keys:
        implied, notes = read_activation(keys)
    activation = hotcold_keys.choice("ffn.activation", ACTIVATIONS, implied)
    value = hotcold_keys.get("ffn.threshold", 0.0)
    several = hasattr(value, "__len__") and not isinstance(value, str)
    thresholds = list(value) if several else [value]
    if not all(map(is_number, thresholds)) or (several and len(thresholds) != layers):
        got = f"{hotcold_keys.name('ffn.threshold')} is {shown(value)}"
        raise ModelError(f"{got}: a number is needed, or an array of {layers}, one for each layer")
    try:
        for threshold in thresholds:
            check_activation(activation, float(threshold), gated=gated)
    except ValueError as error:
        raise ModelError(f"{hotcold_keys.name('ffn')}: {error}") from None
    return activation, tuple(map(float, thresholds)) if several else float(value), notes


def _implied_layout(tensors: Mapping[str, TensorInfo]) -> str:
    """Returns the layout of experts' down by its shape, without a key (PowerInfer's --transpose-down). Square
    matrices have llama.cpp's layout."""
    up, down = (tensors.get(f"blk.0.ffn_{part}_exps.weight") for part in ("up", "down"))
    if up and down and up.shape == down.shape and up.shape[-1] != up.shape[-2]:
        return "by_neuron"
    return "by_output"
