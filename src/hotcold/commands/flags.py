"""Turns the names of options in the library's messages into flags.

The library is called from Python, too, so its errors and notes name options as Python does, between
backticks: `vram_budget`, or `gpu=off` with a value. The command line says --vram-budget and --gpu off."""

import re

_NAME = re.compile(r"`([a-z_]+)(?:=([^`]+))?`")

_SAME = (
    "activation again allow_requantize cache_positions cache_type cold_prompts dense device distil down "
    "draft draft_max epochs force format gpu hardware hot_backend hot_threads imatrix learning_rate "
    "max_marked max_share measure method no_draft placement pooling predictor_type predictors prompt_math "
    "ram_budget rate recall shape sparsity state_copies take_predictors tensor_type timeline tokens type "
    "vram_budget work"
)
#: By the option's name in Python.
FLAGS = {name: f"--{name.replace('_', '-')}" for name in _SAME.split()}
FLAGS |= {"context": "-c", "n_prompt": "-p", "n_gen": "-n", "output": "-o"}
FLAGS |= {"deadline_s": "--deadline", "timeout_s": "--timeout"}


def in_flags(text: str) -> str:
    """Returns the text with flags instead of the names of options."""
    return _NAME.sub(_flag, text)


def _flag(match: re.Match[str]) -> str:
    flag = FLAGS.get(match[1])
    if flag is None:
        return match[0]
    return flag if match[2] is None else f"{flag} {match[2]}"
