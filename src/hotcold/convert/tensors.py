"""Lists the GGUF tensors of a checkpoint: checked by their headers now, loaded when they are written."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from hotcold.convert import drafting
from hotcold.convert.checkpoint import Checkpoint, Rearrange
from hotcold.convert.gpt_oss import expert_sources
from hotcold.convert.layouts import DRAFTING_RULES, Layout, Rule
from hotcold.convert.metadata import dimensions, rope_of, rope_tables
from hotcold.convert.predictors import own_predictors
from hotcold.convert.quantised import Dequantised, dequantised
from hotcold.convert.settings import ConvertError, Settings
from hotcold.convert.source import Source, loaded, unchanged
from hotcold.convert.tensor_files import Array
from hotcold.model.families import FAMILIES
from hotcold.values import shown

#: Tensors that follow from config.json.
_REDUNDANT = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attention\.masked_bias$|^model\.decoder\.version$")


def sources(
    checkpoint: Checkpoint,
    layout: Layout,
    down_layout: str,
    *,
    draft: bool = True,
    notes: list[str] | None = None,
) -> list[Source]:
    """All GGUF tensors in file order. ConvertError: one is missing, unknown, or of another shape. ``draft``
    includes draft blocks; unexpected ones are left out, and ``notes`` says why."""
    sizes = dimensions(checkpoint.config)
    checkpoint = dequantised(checkpoint)
    if "embed_tokens.weight" in checkpoint.files:  # saved without a head, like Qwen3-Embedding
        checkpoint = checkpoint.renamed({"": "model."}, ())
        checkpoint = replace(checkpoint, config=checkpoint.config.having({"headless": True}))
    unread = checkpoint.config.get("unread", ())
    checkpoint = _with_head(checkpoint.renamed(layout.prefixes, (*layout.ignored, *unread)), layout, notes)
    config, blocks, whole = checkpoint.config, 0, (checkpoint, 0)
    if layout.drafting:
        checkpoint, blocks = whole = drafting.numbered(checkpoint, sizes["L"])
        checkpoint = checkpoint.renamed({}, drafting.prefixes_of(sizes["L"], blocks))
    if layout.architecture == "gpt-oss" and down_layout == "by_neuron":
        # Its blocks of MXFP4 run along the neurons: a transposed matrix would have to be quantised again.
        raise ConvertError("down layout by_neuron is not possible for gpt-oss: by_output is needed")
    rules = [rule for rule in layout.rules if _holds(config, rule.when)]
    first, *last = (rule for rule in rules if "{}" not in rule.target)
    tensors = [*_of_rule(checkpoint, layout, first, 0, sizes, down_layout)]
    for layer in range(sizes["L"]):
        tensors += _of_layer(checkpoint, layout, layer, sizes, down_layout)
    if draft and blocks and FAMILIES[layout.architecture].drafts:
        tensors += _of_blocks(*whole, layout, sizes, down_layout, notes if notes is not None else [])
    for rule in last:
        tensors += _of_rule(checkpoint, layout, rule, 0, sizes, down_layout)
    if layout.predictor:
        tensors += own_predictors(checkpoint, layout.predictor, sizes)
    _refuse_others(checkpoint, {origin for source in tensors for origin in source.origins}, layout.left_out)
    if notes is not None:
        notes += _dequantisation_notes(whole[0], tensors)
    for source in [*tensors]:
        if source.factors:
            name, shape = source.name.removesuffix("weight") + "scale", (len(source.origins),)
            tensors.append(Source(name, shape, source.origins, source.factors))
    for name, table in rope_tables(config).items():
        tensors.append(Source(name, table.shape, ("rope_scaling",), partial(np.copy, table)))
    return tensors


def _dequantisation_notes(checkpoint: Checkpoint, sources: list[Source]) -> list[str]:
    """A note if quantised matrices do not stay blocks."""
    names = {name for source in sources if not source.packed for name in source.origins}
    matrices = [
        name
        for name in names & checkpoint.files.keys()
        if isinstance(checkpoint.files[name].file, Dequantised)
    ]
    method = checkpoint.config.get("quantised")
    return [f"{len(matrices)} matrices that {method.name} quantised are dequantised"] if matrices else []


def _with_head(checkpoint: Checkpoint, layout: Layout, notes: list[str] | None) -> Checkpoint:
    """The checkpoint with the setting ``own_head``: whether the head is a tensor of its own. It always is if
    a stored head differs from the embedding."""
    names = {rule.target: f"{rule.source}.weight" for rule in layout.rules if "{}" not in rule.target}
    head, table = names.get("output", ""), names["token_embd"]
    config, files = checkpoint.config, checkpoint.files
    tied = config.flag("tie_word_embeddings", False)
    if not tied and head not in files and config.flag("headless", False):
        tied = True
        if notes is not None:
            notes.append("the model has no head (lm_head): the file gives embeddings, but no meaningful text")
    elif tied and {head, table} <= files.keys() and not checkpoint.same(head, table):
        tied = False
        if notes is not None:
            notes.append(f"config.json ties the head to the embedding, but {head} differs: {head} is kept")
    elif tied and table in files and _factors(config, "output") != _factors(config, "token_embd"):
        tied, files = False, {**files, head: files[table]}
    return replace(checkpoint, config=config.having({"own_head": not tied}), files=files)


def _factors(config: Settings, target: str) -> tuple[float, float]:
    """The factors of a matrix's input and of its output."""
    factors: tuple[float, float] = config.get("factors", {}).get(target.rpartition(".")[2], (1, 1))
    return factors


def _of_layer(
    checkpoint: Checkpoint, layout: Layout, layer: int, sizes: Mapping[str, int], down_layout: str
) -> list[Source]:
    config = checkpoint.config
    sources: list[Source] = []
    for rule in layout.rules:
        if "{}" not in rule.target or not _holds(config, rule.when):
            continue
        if not rule.layers or config.values[rule.layers][layer]:
            sources += _of_rule(checkpoint, layout, rule, layer, sizes, down_layout)
    sources += layout.layer_sources(checkpoint, layer, sizes, down_layout)
    if layout.architecture == "gpt-oss":
        sources += expert_sources(checkpoint, layer, sizes)
    return sources


def _of_blocks(
    checkpoint: Checkpoint,
    count: int,
    layout: Layout,
    sizes: Mapping[str, int],
    down_layout: str,
    notes: list[str],
) -> list[Source]:
    """The draft blocks: each is a layer, and the matrix that joins a token's row and a hidden row."""
    config, layers = checkpoint.config, sizes["L"]
    checkpoint = replace(checkpoint, config=drafting.with_blocks(config, count))
    tensors: list[Source] = []
    named = [name for name in checkpoint.files if name.startswith(drafting.prefixes_of(layers, count))]
    tables = [name for name in named if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))]
    try:
        unneeded = {name for name in tables if drafting.shared(checkpoint, name)}
        for layer in range(layers, layers + count):
            tensors += _of_layer(checkpoint, layout, layer, sizes, down_layout)
            for rule in DRAFTING_RULES:
                origin = f"{rule.source.format(layer)}.weight"
                if rule.when is True or (origin in checkpoint.files and origin not in unneeded):
                    tensors += _of_rule(checkpoint, layout, rule, layer, sizes, down_layout)
    except ConvertError as error:
        notes.append(f"the draft block is left out: {error}")
        return []
    origins = {origin for source in tensors for origin in source.origins} | unneeded
    if others := [name for name in named if name not in origins]:
        reason = f"it has unknown tensors ({len(others)}, such as {shown(others[0])})"
        notes.append(f"the draft block is left out: {reason}")
        return []
    return tensors


def _of_rule(
    checkpoint: Checkpoint, layout: Layout, rule: Rule, layer: int, sizes: Mapping[str, int], down_layout: str
) -> Iterator[Source]:
    rearrange = _rearrangement(rule, layout, sizes, down_layout, checkpoint.config)
    parts = {"weight": rule.shape} | ({"bias": rule.shape[0]} if _holds(checkpoint.config, rule.bias) else {})
    for part, letters in parts.items():
        shape = tuple(sizes[letter] for letter in letters)
        experts = range(sizes["E"]) if rule.each_expert else [0]  # a name without a second {} ignores it
        origins = [rule.source.format(layer, expert) + f".{part}" * (not rule.bare) for expert in experts]
        target = rule.target.format(layer) + f".{part}" * (not rule.bare)
        if rule.each_expert:
            shape = shape[1:]
        results: dict[object, tuple[int, ...]] = {
            _turned: (*shape[:-2], *shape[:-3:-1]),
            _only_row: shape[1:],
        }
        result = results.get(rearrange, shape)
        norm = part == "weight" and len(letters) == 1  # no other weight is a vector
        change = plus_one if norm and layout.norms_less_one else rearrange
        read, given = _factors(checkpoint.config, rule.target)
        factor = read * given if part == "weight" else given
        if factor != 1:
            change = partial(times, change=change, factor=factor)
        moves_rows = getattr(change, "func", change) in (interleave_rotary, ungroup_heads)
        yield loaded(checkpoint, target, origins, shape, change, result, moves_rows=moves_rows)


def _holds(config: Settings, condition: bool | str) -> bool:
    return config.flag(condition, False) if isinstance(condition, str) else condition


def _rearrangement(
    rule: Rule, layout: Layout, sizes: Mapping[str, int], down_layout: str, config: Settings
) -> Rearrange:
    if rule.shape.startswith("1"):
        return _only_row
    if rule.heads == "groups":
        return partial(ungroup_heads, kv_heads=sizes["G"], head_dim=sizes["d"])
    if rule.heads and layout.interleaved and not layout.already:
        return partial(interleave_rotary, heads=sizes[rule.heads])
    if rule.heads and config.flag("halves", False):
        return partial(halve_rotary, heads=sizes[rule.heads], rotated=rope_of(config).dim)
    if rule.shape[-2:] in ("DN", "DM", "DS", "IM") and down_layout == "by_neuron":
        return _turned
    return unchanged


def _turned(values: Array) -> Array:
    """Transposes a matrix, or each of a stack; a bias stays as it is."""
    return values.swapaxes(-1, -2) if values.ndim > 1 else values


def _only_row(values: Array) -> Array:
    row: Array = values[0]
    return row


def plus_one(values: Array) -> Array:
    """``values + 1`` in float32, because float16 would round it."""
    return values.astype(np.float32) + np.float32(1)


def times(values: Array, change: Rearrange, factor: float) -> Array:
    """``factor * change(values)`` in float32."""
    return change(values).astype(np.float32) * np.float32(factor)


def _refuse_others(checkpoint: Checkpoint, used: set[str], left_out: str) -> None:
    if not checkpoint.config.flag("own_head", True):
        used.add("lm_head.weight")
    others = [name for name in checkpoint.files if name not in used and not _REDUNDANT.search(name)]
    if left_out:
        others = [name for name in others if not re.search(left_out, name)]
    if others:
        got = f"tensors that are not supported for this model ({len(others)}, such as {shown(others[0])})"
        raise ConvertError(f"{checkpoint.folder} has {got}: without them it would be another model")


def interleave_rotary(values: Array, heads: int) -> Array:
    """Reorders rows of q or k from Hugging Face's half-split order to GGUF ``llama``'s interleaved order.
    Within each head, row i of the first half and row i of the second, a rotated pair, become neighbours."""
    paired = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def halve_rotary(values: Array, heads: int, rotated: int) -> Array:
    """Reorders rows of q or k with neighbouring pairs to half-split order. Within each head, the first rows
    of all pairs come first, then the second rows, then the rows that are not rotated."""
    rows = values.reshape(heads, -1, *values.shape[1:])
    parts = rows[:, :rotated:2], rows[:, 1:rotated:2], rows[:, rotated:]
    return np.concatenate(parts, axis=1).reshape(values.shape)


def ungroup_heads(values: Array, kv_heads: int, head_dim: int) -> Array:
    """Reorders rows of a fused q, k, v from groups (heads of q with their shared k and v) to q, k, v."""
    groups = values.reshape(kv_heads, -1, head_dim, *values.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
