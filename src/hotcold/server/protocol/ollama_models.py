"""Ollama's routes for the one model: ``/api/tags``, ``ps``, ``show``, ``pull`` and ``version``."""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.ollama_reply import moment
from hotcold.values import shown
from hotcold.version import __version__

#: llama.cpp's numbers of file types -> names in Ollama.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
#: The version of Ollama that the routes imitate: clients refuse older ones.
_VERSION = "0.14.0"
_ON_HUB = re.compile(r"hf:|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_NEVER = "9999-12-31T23:59:59.000000Z"  # the model stays loaded as long as the server runs


def tags(facts: Facts, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the list of models."""
    return {"models": [_entry(facts, metadata)]}


def running(facts: Facts, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the list of loaded models."""
    state = {"expires_at": _NEVER, "size_vram": 0, "context_length": facts.context}
    return {"models": [{**_entry(facts, metadata), **state}]}


def version() -> dict[str, Any]:
    return {"version": _VERSION, "hotcold": __version__}


def pulled(facts: Facts, name: str) -> list[dict[str, Any]]:
    """Returns the progress of pulling the model, which is present. Raises APIError for another model."""
    if _plain(name) not in map(_plain, facts.names):
        fix = f"start another server with `hotcold serve -m {shown(name, 80)}`"
        message = f"model {shown(name, 80)} is not served here: this server has {facts.name}; {fix}"
        raise APIError(message, status=404, param="model", code="model_not_found")
    return [{"status": "pulling manifest"}, {"status": "success"}]


def _plain(name: str) -> str:
    """Returns a name as Ollama compares it: lower case, without the default tag and the hub's address."""
    name = name.lower().removesuffix(":latest")
    return name[match.end() :] if (match := _ON_HUB.match(name)) else name


def show(facts: Facts, metadata: Mapping[str, Any], template: str, thinks: bool) -> dict[str, Any]:
    """Returns facts of the model: the values of its file, except the vocabulary."""
    info = {name: value for name, value in metadata.items() if _is_plain(name, value)}
    # Clients read this as the limit of a conversation.
    info[f"{metadata.get('general.architecture')}.context_length"] = facts.context
    params = facts.sampling
    return {
        "modelfile": f"FROM {facts.name}",
        "parameters": "\n".join(
            f"{name} {value}" if isinstance(value, int) else f"{name} {value:g}"
            for name, value in (
                ("num_ctx", facts.context),
                ("temperature", params.temperature),
                ("top_k", params.top_k),
                ("top_p", params.top_p),
                ("min_p", params.min_p),
                ("repeat_penalty", params.repeat_penalty),
            )
        ),
        "template": template,
        "modified_at": moment(facts.created),
        "details": _details(facts, metadata),
        "model_info": {**info, "general.parameter_count": facts.params},
        "capabilities": [*facts.capabilities, *(["thinking"] if thinks else [])],
    }


def _is_plain(name: str, value: object) -> bool:
    """Returns whether a value is a single value that JSON can hold."""
    if name.startswith("tokenizer."):
        return False
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _entry(facts: Facts, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": facts.name,
        "model": facts.name,
        "modified_at": moment(facts.created),
        "size": facts.size_bytes,
        "digest": hashlib.sha256(facts.fingerprint.encode()).hexdigest(),
        "details": _details(facts, metadata),
    }


def _details(facts: Facts, metadata: Mapping[str, Any]) -> dict[str, Any]:
    family = str(metadata.get("general.architecture", ""))
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _size(facts.params),
        "quantization_level": quantisation(metadata) or "unknown",
    }


def quantisation(metadata: Mapping[str, Any]) -> str:
    """Returns the name of the file's type; empty if the file has none, or an unknown one."""
    number = metadata.get("general.file_type")
    return _FILE_TYPES.get(number, "") if isinstance(number, int) else ""


def _size(params: int) -> str:
    for unit, one in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if params >= one:
            return f"{params / one:.1f}{unit}"
    return str(params)
