"""A file's block that drafts tokens: multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

To draft the token at position i + 2 it reads the model's hidden row of position i, after the last norm. It
also reads the embedding of the token at position i + 1. Each has its own norm. One matrix joins both into a
row. A layer like those of the model transforms the row, with its own keys and values at position i. Then a
norm and the head give logits. The norm's output is the hidden row for the next draft token.

Names are llama.cpp's. The block follows the last layer. ``nextn.eh_proj`` is the matrix, with columns for the
embedding, then for the hidden row. ``enorm`` and ``hnorm`` are their norms, ``shared_head_norm`` is the last
norm. The block may have its own embedding (``embed_tokens``) and head (``shared_head_head``); without them,
or without the last norm, it uses the model's. Nemotron 3 has layers of only attention or experts, but both in
its block, and a LayerNorm at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotcold.formats.blocks import BlockTypeError, block_type
from hotcold.formats.gguf import GGUFFile, TensorInfo
from hotcold.kernels.backend import Backend, Floats
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.hidden_input import HiddenInput
from hotcold.model.keys import Keys
from hotcold.model.kv_cache import SequenceState
from hotcold.model.mixers.mixer import NO_MIXER
from hotcold.model.reading import Progress, Shape
from hotcold.model.transformer import Transformer
from hotcold.model.weights import ModelReader, Weights, expected_shapes, fits, output_norm


def with_draft(config: Config, tensors: Mapping[str, TensorInfo]) -> tuple[Config, str]:
    """Adds the draft block to a configuration. If the file has blocks that are not computed, returns the
    unchanged configuration and the reason. Of several blocks the first drafts every token."""
    if not config.drafting:
        return config, ""
    if not config.family.drafts:
        return config, f"draft blocks are not supported in {config.architecture} models"
    whole = _with_block(config, tensors)
    if whole is None:
        return config, f"the draft block blk.{config.layers} has no FFN like the other layers"
    if error := _tensor_error(whole, tensors):
        return config, f"the draft block blk.{config.layers} is left out: {error}"
    block = replace(
        whole,
        layers=1,
        mixers=whole.mixers[-1:],
        neurons=whole.neurons[-1:],
        dense_layers=frozenset({0} if config.layers in whole.dense_layers else ()),
        drafting=0,
        reads_hidden=True,
        notes=(),
    )
    return replace(config, draft=block), ""


def _with_block(config: Config, tensors: Mapping[str, TensorInfo]) -> Config | None:
    """Returns the configuration with the block as one more layer; None if its parts cannot be determined."""
    i, blk = config.layers, f"blk.{config.layers}."
    mixer = next((each for each in config.mixers[::-1] if each is not NO_MIXER and not each.slot_bytes), None)
    routed, up = f"{blk}ffn_gate_inp.weight" in tensors, tensors.get(f"{blk}ffn_up.weight")
    if mixer is None or mixer.pages_of is not None or (config.experts and config.experts.by_layer):
        return None
    if config.experts and routed:
        neurons, dense = config.experts.count * config.experts.neurons, config.dense_layers
    elif up is not None:
        neurons, dense = up.shape[0] >> config.family.fused_gate, config.dense_layers | {i}
    else:
        return None
    return replace(
        config,
        family=config.family.of_block,
        layers=i + 1,
        cuts=(),
        mixers=(*config.mixers, mixer),
        neurons=(*config.neurons, neurons),
        dense_layers=dense if config.experts else frozenset(),
    )


def _shapes(whole: Config, present: Mapping[str, TensorInfo]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns shapes by name of the block's required and of its optional tensors."""
    d, v, blk = whole.dim, whole.vocab, f"blk.{whole.layers - 1}."
    required, optional = (
        {name: shape for name, shape in shapes.items() if name.startswith(blk)}
        for shapes in expected_shapes(whole, present)
    )
    required |= {f"{blk}nextn.{name}.weight": (d,) for name in ("enorm", "hnorm")}
    required[f"{blk}nextn.eh_proj.weight"] = d, 2 * d
    optional |= {f"{blk}nextn.{name}.weight": (v, d) for name in ("embed_tokens", "shared_head_head")}
    norm_shapes = required if whole.family.draft_layer_norm else optional
    norm_shapes[f"{blk}nextn.shared_head_norm.weight"] = (d,)
    return required, optional


def _tensor_error(whole: Config, tensors: Mapping[str, TensorInfo]) -> str:
    """Describes the error in the block's tensors; empty without one."""
    blk = f"blk.{whole.layers - 1}."
    required, optional = _shapes(whole, tensors)
    if missing := [name for name in required if name not in tensors]:
        return f"tensor {missing[0]} is missing"
    for name, info in tensors.items():
        if not name.startswith(blk):
            continue
        shape = required.get(name) or optional.get(name)
        if shape is None:
            return f"tensor {name} is unknown"
        if not fits(info.shape, shape):
            return f"tensor {name} has shape {info.shape}, not {shape}"
        try:
            block_type(info.type)
        except BlockTypeError as error:
            return f"tensor {name}: {error}"
    joined = tensors[f"{blk}nextn.eh_proj.weight"].type
    if whole.dim % joined.weights:
        return f"a block of {joined.name} crosses the border of its two halves"
    return ""


def draft_bytes(file: GGUFFile, config: Config) -> int:
    """Returns bytes of the tensors of a configuration's draft block."""
    blk = f"blk.{config.layers}."
    return sum(info.nbytes for name, info in file.tensors.items() if name.startswith(blk) and config.draft)


def load_draft(
    file: GGUFFile,
    config: Config,
    devices: Backend | Devices,
    model: Weights,
    progress: Progress | None = None,
) -> Weights:
    """Reads a configuration's draft block, as a model of one layer, into the embedding's backend. It shares
    missing parts with ``model``, but reads the last norm and the head again if the model's are on another
    backend. Errors as in :func:`load_weights`."""
    whole = _with_block(config, file.tensors)
    assert whole is not None
    devices = Devices.from_backend(devices, config.layers)
    backend, apart = devices.embedding, devices.head is not devices.embedding
    nextn, total = f"blk.{config.layers}.nextn.", draft_bytes(file, config)
    reader = ModelReader.from_file(file, whole, backend, progress or (lambda done, total: None), total)
    layer = reader.layer(config.layers, backend.ffn_weights)
    joined = file.load(f"{nextn}eh_proj.weight")
    blocks = np.arange(2 * config.dim // joined.type.weights).reshape(2, -1)
    of_token, of_hidden = (backend.matrix(joined.take_columns(half)) for half in blocks)
    reader.count(joined)
    token_norm, hidden_norm = (reader.norm(f"{nextn}{name}") for name in ("enorm", "hnorm"))
    has_own = {name: f"{nextn}{name}.weight" in file.tensors for name in ("embed_tokens", "shared_head_head")}
    last = reader.own_norm(f"{nextn}shared_head_norm")
    if last is None and apart:
        last = reader.norm(output_norm(file.tensors), 1 / config.scales.logits)
    last = last or model.norm
    if config.family.draft_layer_norm:
        key = "attention.layer_norm_epsilon"
        eps = Keys(file.metadata, config.architecture).number(key, 0, 0.1, default=config.norm_eps)
        last = replace(last, eps=eps, centre=True)
    head = model.head
    if has_own["shared_head_head"]:
        head = reader.matrix(f"{nextn}shared_head_head")
    elif apart:
        head = reader.matrix("output") if "output.weight" in file.tensors else model.embedding
    return Weights(
        embedding=reader.matrix(f"{nextn}embed_tokens") if has_own["embed_tokens"] else model.embedding,
        layers=(layer,),
        norm=last,
        head=head,
        rope_factors=model.rope_factors,
        norm_values=reader.norm_values,
        hidden=HiddenInput(config.dim, token_norm, hidden_norm, of_token, of_hidden),
    )


def _bytes_of(config: Config, weights: Weights) -> tuple[int, int, int]:
    """Returns bytes that reading some rows takes: a fixed number, a number per row, and the limit of all
    rows. Each row counts experts of its own."""
    layer, hidden = weights.layers[0], weights.hidden
    assert hidden is not None
    whole = layer.dense_bytes + layer.shared_bytes + hidden.of_token.nbytes + hidden.of_hidden.nbytes
    neurons = layer.ffn.nbytes
    if config.experts is None or config.dense_layers:
        return whole + neurons, 0, 0
    return whole, neurons * config.experts.chosen // config.experts.count, neurons


class DraftBlock:
    """Drafts tokens for a model with the model's draft block, which reads the rows of the model's last step.

    Its keys and values are in pages of their own, with the model's page numbers, so that one lookup finds
    both. The entry of a page's last position belongs to the token that followed when it was written. If
    another token follows later, drafts there are slightly worse; nothing else changes."""

    def __init__(
        self,
        model: Transformer,
        config: Config,
        weights: Weights,
        ffns: Sequence[AnyFFN],
        pages: int,
        type: str,
        backend: Backend | None = None,
    ) -> None:
        """``config`` and ``weights`` are the model's; ``pages`` and ``type`` those of its cache. The block is
        on ``backend``; None: on that of the model's head."""
        assert config.draft is not None and weights.draft is not None and weights.draft.hidden is not None
        ops, limits = backend or model.head, model.batch.limits
        state = SequenceState(ops, config.draft, pages, type)
        self._ops, self._own = ops, Transformer(config.draft, weights.draft, ops, ffns, limits, state)
        self.batch = self._own.batch  #: of the next step
        self._head_ops = model.head  # of the model; the block's may be another
        self._normed = self._own.hidden if ops is model.head else model.spare_rows
        self._take = model.record_normed(self._normed)
        self._body, self._head = self._own.record_parts(ffns, [range(2), range(2, 3)])
        self.nbytes_read = 0  #: of weights, without steps with prompt rows
        self._bytes, self._row_bytes, self._most_bytes = _bytes_of(config.draft, weights.draft)
        self._head_bytes = weights.draft.head.nbytes

    def read(self) -> None:
        """Reads the rows that :attr:`batch` describes: the rows of the model's last step, in order, each with
        the token that follows it."""
        self._take.run()
        if self._ops is not self._head_ops:
            self._ops.copy(self._head_ops, self._normed, self._own.hidden, self.batch.n_tokens)
        self._run_body()

    def read_own(self, rows: Sequence[int]) -> None:
        """Reads the rows of draft tokens that :attr:`batch` describes; ``rows`` are the rows of logits that
        each token was drafted from."""
        hidden = self._own.read_hidden(0, max(rows) + 1)[rows]
        self._ops.write(self._own.hidden, hidden)
        self._run_body()

    def _run_body(self) -> None:
        self._body.run()
        if self.batch.n_tokens == self.batch.n_decode:
            self.nbytes_read += self._bytes + min(self._row_bytes * self.batch.n_tokens, self._most_bytes)

    def logits(self) -> Floats:
        """Computes the logits of the batch's logits rows, ``[R, V]``; valid until the next step."""
        self._head.run()
        self.nbytes_read += self._head_bytes
        return self._own.read_logits(0, self.batch.n_logits)
