"""Measures how long a model's tokens take with all in memory, without loading all of it: tokens of its first
layers, of a few more of them, and what each further layer adds."""

import copy
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import GGUFFile
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.placement.shelves import expert_bytes
from hotcold.runtime.loading import load_open
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.bench import prompt_of

_LAYER = re.compile(r"blk\.(\d+)\.")
_PROMPT, _TOKENS = 8, 12  #: of a round
_LEAST_ROUNDS = 3
_SECONDS = 3.0  # of both sizes together
_LEAST_LAYERS = 2  # of each of the two sizes
_MOST_PERIOD = 8  # layers after which a model's kinds of layers begin again


@dataclass(frozen=True)
class TokenTime:
    """Seconds of a decoded token, all weights in memory."""

    layers: int  #: the first ones of the model, whose kinds do not come again
    loaded: int  #: the first ones that were loaded
    first_s: float  #: of a token that has these layers alone, with embedding, head and Python
    layer_s: float  #: that each further layer adds
    position: float  #: of the tokens, in the mean

    def token_s(self, layers: int) -> float:
        """Seconds of a token of a model with so many layers."""
        return self.first_s + (layers - self.layers) * self.layer_s

    def __str__(self) -> str:
        of = f"{1e3 * self.layer_s:.2f} ms a layer and {1e3 * self.besides_s:.1f} ms besides"
        return f"a token in memory takes {of}, by the first {self.loaded} layers"

    @property
    def besides_s(self) -> float:
        """Seconds of a token besides all layers."""
        return max(0.0, self.first_s - self.layers * self.layer_s)


def first_layers(file: GGUFFile, count: int) -> GGUFFile:
    """The model that has the first layers of a file and all that lies in no layer; it reads the same file.
    Nothing lies beside it: no profile, and no predictor."""
    name = file.metadata["general.architecture"]
    layers = int(file.metadata[f"{name}.block_count"])
    found = copy.copy(file)
    found.metadata = {
        key: value[:count] if _is_by_layer(key, value, name, layers) else value
        for key, value in file.metadata.items()
    }
    found.metadata[f"{name}.block_count"] = count
    found.metadata.pop(f"{name}.nextn_predict_layers", None)
    found.tensors = {
        name: info
        for name, info in file.tensors.items()
        if (layer := _LAYER.match(name)) is None or int(layer[1]) < count
    }
    found.path = file.path.with_name(f"{file.path.stem}, {count} layers{file.path.suffix}")
    return found


def _is_by_layer(key: str, value: Any, architecture: str, layers: int) -> bool:
    own = key.startswith(f"{architecture}.") and not isinstance(value, str)
    return own and isinstance(value, list | np.ndarray) and len(value) == layers


def sizes_to_time(file: GGUFFile, config: Config) -> tuple[int, int] | None:
    """Two numbers of first layers: those that are like no later ones (at least two, as one alone may stay in
    the processor's cache), and as many more as have each kind of the others once, at least two. None: the
    model has no more than that."""
    kinds = [*zip(config.mixers, expert_bytes(file, config), strict=True)]
    first = _LEAST_LAYERS
    while first < len(kinds) and kinds[first][1] != kinds[-1][1]:
        first += 1
    own = kinds[first:]
    alike = [n for n in range(_LEAST_LAYERS, _MOST_PERIOD + 1) if own[n:] == own[:-n]]
    more = alike[0] if alike else _LEAST_LAYERS
    return (first, first + more) if first + more <= len(kinds) else None


def time_tokens(file: GGUFFile, sizes: tuple[int, int], options: Mapping[str, Any]) -> TokenTime:
    """Decodes tokens of both sizes in turns; the smaller model has the larger one's weights. UserError: such
    a model cannot be loaded, or has no room."""
    few, more = sizes
    large = load_open(first_layers(file, more), options)
    models = _with_layers(large, first_layers(file, few), few), large
    with ExitStack() as opened:
        runs = []
        for model in models:
            session = opened.enter_context(closing(model.session()))
            runs.append(_Rounds(Engine(session), prompt_of(large, _PROMPT)).seconds)
        rounds = in_turns(runs)
    layer = statistics.median((b - a) / (more - few) for a, b in rounds)
    small = statistics.median(a for a, _ in rounds)
    return TokenTime(few, more, small, max(0.0, layer), _PROMPT + _TOKENS / 2)


def _with_layers(model: LoadedModel, file: GGUFFile, count: int) -> LoadedModel:
    """The first layers of what was loaded, which ``file`` has alone."""
    devices = model.devices
    return replace(
        model,
        config=Config.from_metadata(file.metadata, file.magic, file.tensors),
        weights=replace(model.weights, layers=model.weights.layers[:count]),
        devices=Devices(devices.embedding, devices.layers[:count], devices.head),
    )


def in_turns(runs: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Calls each in turn, round by round, after one that is not counted, for some seconds."""
    for run in runs:
        run()
    start = time.perf_counter()
    found: list[list[float]] = []
    while len(found) < _LEAST_ROUNDS or time.perf_counter() - start < _SECONDS:
        found.append([run() for run in runs])
    return found


@dataclass
class _Rounds:
    engine: Engine
    prompt: list[int]
    seed: int = 0

    def seconds(self) -> float:
        """Seconds of a token, in the mean of a few that are drawn."""
        self.seed += 1
        how = SamplingParams(temperature=1.0, seed=self.seed)
        before = self.engine.session.counters.copy()
        job = Job(self.prompt, how, max_tokens=_TOKENS, ignore_eos=True, cache=False)
        self.engine.run([Request(job)])
        counters = self.engine.session.counters.since(before)
        return counters.decode_s / counters.decode_tokens
