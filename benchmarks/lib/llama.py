"""llama.cpp of the package llama-cpp-python, silent: its quantiser, and as a contestant."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.gguf import open_gguf
from hotcold.tasks.scoring import log_softmax
from lib.contestants import (
    DECODE,
    FILL,
    FIRST_TOKEN,
    LOADING,
    Measured,
    Plan,
    Run,
    loading,
    number,
    random_tokens,
)

#: llama.cpp logs to the function that it was given last, for as long as the process lives: so must these.
_CALLBACKS: list[Any] = []


def open_llama_cpp() -> Any:
    """The package, which prints nothing. ImportError: llama-cpp-python is not installed."""
    import llama_cpp

    # A function that is collected while the library still calls it ends the process.
    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _CALLBACKS.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def quantise(source: Path, path: Path, type: str, threads: int) -> None:
    """By llama.cpp's quantiser. SystemExit: it cannot."""
    llama_cpp = open_llama_cpp()
    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}", None)
    if ftype is None:
        raise SystemExit(f"type {type} is none of llama.cpp's: Q4_K_M, Q5_K_M, Q6_K and IQ4_NL are")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, threads
    with quiet():
        code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama.cpp cannot quantise to {type}: code {code}")


def quantise_rows(values: Any, type: int, nbytes: int, importance: Any, threads: int) -> Any:
    """Rows packed by ``ggml_quantize_chunk``, as many bytes each; the rows are divided among threads, as
    llama.cpp's quantiser does it."""
    import llama_cpp._ggml

    packed = np.empty((len(values), nbytes), np.uint8)
    at = ctypes.c_void_p(None if importance is None else importance.ctypes.data)
    columns = ctypes.c_int64(values.shape[1])

    def pack(start: int, end: int) -> None:
        rows, out = (ctypes.c_void_p(array[start:].ctypes.data) for array in (values, packed))
        count = ctypes.c_int64(end - start)
        llama_cpp._ggml.libggml.ggml_quantize_chunk(type, rows, out, ctypes.c_int64(0), count, columns, at)

    if threads == 1:
        pack(0, len(values))
        return packed
    bounds = np.linspace(0, len(values), threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(pack, bounds[:-1], bounds[1:]))
    return packed


@contextmanager
def quiet() -> Iterator[None]:
    """Without what C++ prints to stderr."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


class LlamaCpp:
    """``llama_decode`` on given tokens, without sampling and text.

    Each measure has flash attention on or off, whichever is faster. One sequence and several have contexts of
    their own, whose KV cache is F16; batches and their parts are llama-bench's. Rows without requested
    logits skip the last layer's FFN, a large part of a model with few layers. So all logits of a prompt are
    requested from synthetic models, and both engines compute the same layers.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """

    def __init__(self, path: Path, threads: int, plan: Plan) -> None:
        lib = self._lib = open_llama_cpp()
        self.path, self.threads, self.plan = path, threads, plan
        self.all_logits = not (plan.published or plan.last_logits)
        self.settings: dict[str, str] = {}  #: by measure, whether flash attention is on
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        with open_gguf(path) as file:
            self._vocab = file.tensors["token_embd.weight"].shape[0]
            # A head of its own is read in each step; else the embedding is the head.
            unread = {"token_embd.weight"} if "output.weight" in file.tensors else set()
            keys = file.metadata
            arch = keys["general.architecture"]
            experts = int(keys.get(f"{arch}.expert_count", 0))
            chosen = int(keys[f"{arch}.expert_used_count"]) if experts else 0
            self._step_bytes = sum(
                info.nbytes * chosen // experts if "_exps." in name else info.nbytes
                for name, info in file.tensors.items()
                if name not in unread
            )
            self._experts = experts > 0  # which of them several tokens read together is not known
            head_dim = keys.get(f"{arch}.attention.key_length")
            if head_dim is None:
                head_dim = keys[f"{arch}.embedding_length"] // keys[f"{arch}.attention.head_count"]
            heads = np.asarray(keys[f"{arch}.attention.head_count_kv"])  # one number, or one of each layer
            layers = int(keys[f"{arch}.block_count"]) if heads.ndim == 0 else 1
            self._position_bytes = layers * 2 * 2 * int(heads.sum()) * int(head_dim)
        self._contexts: dict[str, Any] = {}
        self._make_contexts()

    def can(self, measure: str, turn: int) -> bool:
        return True

    def warm(self, measure: str) -> None:
        """Tries flash attention on and off."""
        if measure == LOADING:
            self.prepare(measure, 0)()
            return
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        for attempt in range(1 if self.plan.slow(measure) else 2):
            for flash, times in seconds.items():
                times.append(self._prepare(measure, attempt, flash)().seconds)
        self.settings[measure] = min(seconds, key=lambda flash: min(seconds[flash]))

    def prepare(self, measure: str, seed: int) -> Run:
        if measure == LOADING:
            return loading(self.path, self._load, self._free)
        return self._prepare(measure, seed, self.settings[measure])

    def surprise(self, windows: list[list[int]]) -> float:
        """As ours, with the settings of generation."""
        losses: list[float] = []
        for window in windows:
            for row, following in zip(self.logits(window), window[1:], strict=False):
                losses.append(-float(log_softmax(row)[following]))
        return float(np.mean(losses))

    def logits(self, window: list[int]) -> Any:
        """Returns those after each token, ``[tokens, V]``: a view, valid until anything else is computed."""
        kind = f"single {self.settings.get(DECODE, 'off')}"
        self._clear(kind)
        self._decode(kind, [window], all_logits=True)
        pointer = self._lib.llama_get_logits(self._contexts[kind])
        return np.ctypeslib.as_array(pointer, (len(window), self._vocab))

    def close(self) -> None:
        for context in self._contexts.values():
            self._lib.llama_free(context)
        self._lib.llama_model_free(self._model)
        self._contexts = {}

    def _load(self) -> tuple[Any, Any]:
        """Another model and a context for it; llama.cpp maps the file."""
        lib = self._lib
        model = lib.llama_model_load_from_file(str(self.path).encode(), lib.llama_model_default_params())
        return model, self._new_context(model, "single", False)

    def _free(self, loaded: tuple[Any, Any]) -> None:
        model, context = loaded
        self._lib.llama_free(context)
        self._lib.llama_model_free(model)

    def _make_contexts(self) -> None:
        for kind in ("single", "several") if self.plan.sequences > 1 else ("single",):
            for flash in ("on", "off"):
                self._contexts[f"{kind} {flash}"] = self._new_context(self._model, kind, flash == "on")

    def _new_context(self, model: Any, kind: str, flash: bool) -> Any:
        params, settings = self._lib.llama_context_default_params(), self._context_settings(kind)
        settings |= {"n_threads": self.threads, "n_threads_batch": self.threads}
        settings |= {"type_k": self._lib.GGML_TYPE_F16, "type_v": self._lib.GGML_TYPE_F16}
        for name, value in (settings | {"flash_attn_type": int(flash)}).items():
            setattr(params, name, value)
        context = self._lib.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {settings['n_ctx']} positions")
        return context

    def _context_settings(self, kind: str) -> dict[str, Any]:
        plan = self.plan
        if kind == "single":  # with as many sequences as _fill needs
            copies = max([1, *(depth // FILL for depth in plan.depths)])
            sizes = {"n_ctx": plan.context, "n_seq_max": copies, "kv_unified": True}
            return sizes | {"n_batch": max(2048, *plan.prompts, 1), "n_ubatch": 512}
        positions = -(-(plan.parallel_prompt + plan.parallel_generate + 8) // 256) * 256
        batch = max(512, plan.sequences * plan.parallel_prompt)
        sizes = {"n_ctx": plan.sequences * positions, "n_seq_max": plan.sequences}
        return sizes | {"n_batch": batch, "n_ubatch": batch}

    def _prepare(self, measure: str, seed: int, flash: str) -> Run:
        plan, n = self.plan, number(measure)
        kind = f"{'several' if measure.endswith('sequences') else 'single'} {flash}"
        self._clear(kind)
        if measure.startswith("prompt"):
            prompt = random_tokens(n, self._vocab, seed)
            return lambda: self._decode(kind, [prompt], all_logits=self.all_logits)
        if measure.startswith("decode"):
            at, steps = n or plan.parallel_prompt, plan.generate
            if n:
                self._fill(kind, n)
            else:
                self._decode(kind, [random_tokens(at, self._vocab, seed)])
        else:
            at, steps = plan.parallel_prompt, plan.parallel_generate
            prompts = [random_tokens(at, self._vocab, 1000 * (seed + 1) + i) for i in range(n)]
            self._decode(kind, prompts)
        self._generate(kind, at, 1, seed)
        return lambda: self._generate(kind, at + 1, steps, seed)

    def _fill(self, kind: str, positions: int) -> None:
        """Copies of a computed beginning, each moved to its place, become one sequence."""
        lib, context = self._lib, self._contexts[kind]
        memory = lib.llama_get_memory(context)
        self._decode(kind, [random_tokens(FILL, self._vocab, 0)])
        size = lib.llama_state_seq_get_size(context, 0)
        state = (lib.ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(context, state, size, 0)
        for copy in range(1, positions // FILL):
            if not lib.llama_state_seq_set_data(context, state, size, copy):
                raise RuntimeError("llama.cpp does not take back the state of its cache")
            lib.llama_memory_seq_add(memory, copy, 0, -1, copy * FILL)
            lib.llama_memory_seq_cp(memory, copy, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, copy, -1, -1)
        assert lib.llama_memory_seq_pos_max(memory, 0) == positions - 1

    def _clear(self, kind: str) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._contexts[kind]), True)

    def _decode(self, kind: str, prompts: list[list[int]], at: int = 0, all_logits: bool = False) -> Measured:
        """One batch: the tokens of each sequence from position ``at`` on; logits of the last ones or all."""
        total = sum(map(len, prompts))
        batch = self._lib.llama_batch_init(total, 0, 1)
        try:
            batch.n_tokens = row = 0
            for sequence, tokens in enumerate(prompts):
                for i, token in enumerate(tokens):
                    batch.token[row], batch.pos[row] = token, at + i
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                    batch.logits[row] = all_logits or i == len(tokens) - 1
                    row += 1
            batch.n_tokens = total
            start = time.perf_counter()
            code = self._lib.llama_decode(self._contexts[kind], batch)
            self._lib.llama_synchronize(self._contexts[kind])
            seconds = time.perf_counter() - start
        finally:
            self._lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode of {total} tokens gave {code}")
        return Measured(total, seconds)

    def _generate(self, kind: str, at: int, steps: int, seed: int) -> Measured:
        """The time of the decode calls alone: filling batches from Python is not llama.cpp's."""
        count = self.plan.sequences if kind.startswith("several") else 1
        tokens = np.random.default_rng(seed + 1).integers(FIRST_TOKEN, self._vocab, (steps, count)).tolist()
        seconds = sum(
            self._decode(kind, [[token] for token in row], at + i).seconds for i, row in enumerate(tokens)
        )
        positions = count * sum(at + i + 1 for i in range(steps))
        nbytes = steps * self._step_bytes + positions * self._position_bytes
        return Measured(steps * count, seconds, None if self._experts and count > 1 else nbytes)
