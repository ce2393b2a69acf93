"""Writes what llama.cpp multiplies the matrices of tiny models with: ``golden_imatrix.npz`` beside each.

Its tool imatrix watches the graph by a callback, and so does this, by the library of llama-cpp-python 0.3.36
(``pip install llama-cpp-python==0.3.36``); the tool would write the same sums and counts.

    python tests/data/make_imatrix_goldens.py
"""

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.imatrix_golden import FILE, NAMES, model_of  # noqa: E402

_F32 = 0


class _Tensor(ctypes.Structure):
    """``ggml_tensor`` of ggml 0.25."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def values(tensor: _Tensor, dtype: Any) -> np.ndarray:
    """Its values where they lie, outermost dimension first."""
    sizes, strides = [*tensor.ne], [*tensor.nb]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (last + np.dtype(dtype).itemsize)).from_address(tensor.data)
    return np.ndarray(sizes[::-1], dtype, memory, strides=strides[::-1])


class Sums:
    def __init__(self) -> None:
        name = llama_cpp.llama_cpp._lib._name.replace("libllama", "libggml-base")
        self._names = ctypes.CDLL(name).ggml_op_name
        self._names.restype = ctypes.c_char_p
        self.found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def _see(self, pointer: int, ask: bool, _: object) -> bool:
        tensor = ctypes.cast(pointer, ctypes.POINTER(_Tensor)).contents
        op = self._names(tensor.op)
        if ask or op not in (b"MUL_MAT", b"MUL_MAT_ID"):
            return op in (b"MUL_MAT", b"MUL_MAT_ID") or not ask
        weights, inputs = tensor.src[0].contents, tensor.src[1].contents
        name = weights.name.decode()
        if inputs.type != _F32 or not name.startswith("blk."):
            return True
        x = values(inputs, np.float32)
        if op == b"MUL_MAT":
            self._add(name, 0, 1, x.reshape(-1, x.shape[-1]))
            return True
        ids = values(tensor.src[2].contents, np.int32)[0, 0]
        for row, chosen in enumerate(ids):
            for place, expert in enumerate(chosen):
                self._add(name, int(expert), weights.ne[2], x[0, row, place % x.shape[2]][None])
        return True

    def _add(self, name: str, expert: int, experts: int, x: np.ndarray) -> None:
        new = np.zeros((experts, x.shape[-1])), np.zeros(experts)
        sums, counts = self.found.setdefault(name, new)
        sums[expert] += (x.astype(np.float64) ** 2).sum(axis=0)
        counts[expert] += len(x)


def compute(path: Path, tokens: list[int], sums: Sums) -> None:
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    for field in ("n_ctx", "n_batch", "n_ubatch"):
        setattr(params, field, 256)
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = _F32
    params.flash_attn_type = 0
    params.cb_eval = sums.callback
    state = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(state, batch) == 0
    llama_cpp.llama_free(state)
    llama_cpp.llama_model_free(model)


def main() -> None:
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            path, tokens = model_of(name, Path(folder))
            sums = Sums()
            compute(path, tokens, sums)
        arrays = {}
        for matrix, (squares, counts) in sums.found.items():
            arrays[f"{matrix}.in_sum2"] = squares.astype(np.float32)
            arrays[f"{matrix}.counts"] = counts.astype(np.float32)
        np.savez_compressed(HERE / name / FILE, **arrays)
        print(name, len(sums.found), (HERE / name / FILE).stat().st_size)


main()
