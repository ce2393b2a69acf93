"""Writes the defaults of transformers' classes for the keys of config.json that ``hotcold convert`` reads.

Usage:

    pip install torch==2.13.0 transformers==5.23.0
    python tools/class_defaults.py [--check]      # --check: exit code 1 if the file would change
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, logging

from hotcold.convert.known_keys import DEFAULTS, has_effect
from hotcold.convert.layouts import LAYOUTS

_OF_ALL = {each.name for each in dataclasses.fields(PreTrainedConfig)}
_PARTLY = "partial_rotary_factor"
_TIED = "tie_word_embeddings"


def row_of(text: Any) -> dict[str, Any]:
    """The defaults of a text model's class, and the names that its keys have besides."""
    kind = type(text)
    values = {
        entry.name: entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        for entry in dataclasses.fields(kind)
        if entry.name not in _OF_ALL
    }
    values |= _rotation(text)
    names = dict(kind.attribute_map)
    values = {names.get(key, key): value for key, value in values.items() if value is not None}
    values = {key: value for key, value in sorted(values.items()) if has_effect(key)}
    return {"values": values} | ({"names": names} if names else {})


def _rotation(text: Any) -> dict[str, Any]:
    """The keys of the rotation, as the class has them without any in config.json."""
    settings: dict[str, Any] = {}
    theta, made = type(text).default_theta, getattr(text, "rope_parameters", None) or {}
    nested = [each for each in made.values() if isinstance(each, dict)]
    if any(each.get("rope_type") != "default" for each in nested or [made]) and made:
        settings["rope_parameters"] = {
            key: each for key, each in made.items() if (key, each) != ("rope_theta", theta)
        }
        settings["rope_theta"] = theta
    elif isinstance(theta, dict):
        settings |= {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    else:
        settings["rope_theta"] = theta
    modeling = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    if _PARTLY in inspect.getsource(modeling):
        settings |= {"rotates_partly": True, _PARTLY: made.get(_PARTLY, 1.0)}
    return settings


def rows() -> dict[str, Any]:
    by_type: dict[str, Any] = {}
    for model_type in LAYOUTS:
        try:
            whole = AutoConfig.for_model(model_type)
        except ValueError:  # a class of the publishers' own
            print(f"{model_type}: transformers has no such class, so no defaults", file=sys.stderr)
            continue
        text = whole.get_text_config()
        by_type[text.model_type] = row_of(text)
        if text.model_type != model_type:
            by_type[model_type] = {"text": text.model_type, _TIED: whole.tie_word_embeddings}
    return dict(sorted(by_type.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    logging.set_verbosity_error()
    lines = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in rows().items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if parser.parse_args().check:
        return int(Path(DEFAULTS).read_text() != text)
    Path(DEFAULTS).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
