"""Finds the layout that a ``config.json`` names, and its facts under Llama's keys."""

import re
from dataclasses import replace

from hotcold.convert import gemma4
from hotcold.convert.known_keys import complete
from hotcold.convert.layouts import LAYOUTS, Layout
from hotcold.convert.quantised import read_method
from hotcold.convert.settings import ConvertError, Settings, is_number
from hotcold.formats.words import MAX_EXPERTS
from hotcold.model.config import MAX_LAYERS, MAX_VOCAB
from hotcold.model.refused import reason_of
from hotcold.values import shown

#: Names of the activation's key besides ``hidden_act``.
_ACTIVATION_KEYS = ("hidden_activation", "activation_function", "activation", "mlp_hidden_act")

#: Sizes that decide the lengths of lists, and the largest value that the engine accepts.
_LARGEST = {
    "num_hidden_layers": MAX_LAYERS,
    "vocab_size": MAX_VOCAB,
    **dict.fromkeys(("num_local_experts", "num_experts", "moe_num_primary_experts"), MAX_EXPERTS),
}


def _check_sizes(config: Settings) -> None:
    """Checks sizes before allocations of such a size; later readers check that they are integers."""
    for key, largest in _LARGEST.items():
        if type(value := config.values.get(key)) is int and value > largest:
            raise config.error(key, f"at most {largest}")


def find_layout(config: Settings) -> tuple[Layout, Settings]:
    """The layout of a ``config.json``, and its facts under Llama's keys."""
    model_type = config.text("model_type")
    if model_type not in LAYOUTS:
        reason = reason_of(model_type) or "docs/convert.md lists the models that are"
        raise ConvertError(f"{config.path}: model_type {shown(model_type)} is not supported: {reason}")
    layout = LAYOUTS[model_type]
    headless = _check_class(config, layout.implementation)
    config = complete(config).having({"headless": headless})
    if layout.texts:
        layout, config = _of_text(config, layout)
    _check_sizes(config)
    facts = layout.adapt(config)
    layout = replace(layout, architecture=facts.get("architecture", layout.architecture))
    config = config.having(facts)
    if config.get(gemma4.PER_LAYER):
        raise config.error(gemma4.PER_LAYER, "none, or an empty object,")
    return layout, config.having(read_method(config))


def _check_class(config: Settings, name: str) -> bool:
    """True if the class is the base of a model, without a head. Some publishers write its name without
    underscores. ConvertError: it is another class."""
    base, stated = re.sub("ForCausalLM$", "Model", name), config.get("architectures")
    if stated not in (None, [name], [name.replace("_", "")], [base]):
        raise config.error("architectures", f"[{name!r}]")
    return name != base and stated == [base]


def _of_text(config: Settings, layout: Layout) -> tuple[Layout, Settings]:
    """The layout of the text model in a model with other parts, and its facts under its own model_type."""
    text, (first, *_) = config.section("text_config"), layout.texts
    kind = text.text("model_type", first)
    if kind not in layout.texts:
        raise text.error("model_type", " or ".join(layout.texts))
    row = layout.texts[kind]
    text_layout = replace(
        LAYOUTS[row], implementation=layout.implementation, prefixes=layout.prefixes, ignored=layout.ignored
    )
    return text_layout, config.having({"model_type": row})


def activation(config: Settings, layout: Layout) -> tuple[str, float | list[float]]:
    """The FFN's activation, and the threshold that a gate must exceed: one number, or one for each layer."""
    hidden_act = config.text("hidden_act")
    if hidden_act not in layout.activations:
        key = next((key for key in _ACTIVATION_KEYS if key in config), "hidden_act")
        raise config.error(key, f"one of {', '.join(layout.activations)}")
    has_threshold = hidden_act == "fatrelu" or (hidden_act == "drelu" and "hidden_act_param" in config)
    return layout.activations[hidden_act], _threshold(config) if has_threshold else 0.0


def _threshold(config: Settings) -> float | list[float]:
    values = config.get("hidden_act_param")
    if not isinstance(values, list):
        return config.number("hidden_act_param")
    layers = config.integer("num_hidden_layers")
    if len(values) != layers or not all(value == 0 or is_number(value) for value in values):
        raise config.error("hidden_act_param", f"a number, or {layers} numbers of at least 0")
    return [float(value) for value in values]
