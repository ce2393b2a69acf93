"""Quantised files: the gguf package's blocks, llama.cpp's metadata, importance where it belongs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.split_models import split_model

from hotcold.demo import model_path
from hotcold.formats.blocks import BLOCK_TYPES, GGML_TYPES, BlockType, Bytes, Floats, Tensor, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.formats.written import NewTensor
from hotcold.quantize import quantization, rewriting
from hotcold.quantize.imatrix import ImatrixError, Importance, ImportanceMatrix
from hotcold.quantize.mixtures import Wishes
from hotcold.quantize.quantization import QuantizeOptions, quantize
from hotcold.quantize.rewriting import QuantizeError

RANDOM = np.random.default_rng(2)
KEYS = {
    "general.architecture": "llama",
    "general.file_type": 0,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "general.name": "A model",
}
SHAPES = {
    "token_embd.weight": (40, 64),
    "output.weight": (40, 64),
    "blk.1.attn_q.weight": (64, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.ffn_down_exps.weight": (3, 64, 96),
    "blk.0.ffn_gate_inp.weight": (3, 64),
    "blk.0.attn_norm.weight": (64,),
}
ARRAYS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, KEYS, {name: quantise(values, "F32") for name, values in ARRAYS.items()})
    return path


def types(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def test_tensors_are_those_of_the_gguf_package(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "new.gguf"
    done = quantize(model, output, QuantizeOptions("q8_0", measure=True))
    reader = gguf.GGUFReader(output)
    assert [tensor.name.removesuffix(".weight") for tensor in reader.tensors] == [
        "output",
        "token_embd",
        *(f"blk.0.{name}" for name in ("attn_norm", "attn_v", "ffn_down_exps", "ffn_gate_inp")),
        "blk.1.attn_q",
    ]
    packed = gguf.GGMLQuantizationType.Q8_0
    wrong = whole = 0.0
    for tensor in reader.tensors:
        values = ARRAYS[tensor.name]
        if "norm" in tensor.name or "inp" in tensor.name:
            assert np.array_equal(tensor.data, values)
            continue
        assert tensor.tensor_type == packed
        assert np.array_equal(tensor.data, gguf.quantize(values, packed))
        wrong += float(((gguf.dequantize(tensor.data, packed) - values) ** 2).sum())
        whole += float((values**2).sum())
    shares = {share.type: share for share in done.shares}
    assert shares["Q8_0"].error == pytest.approx((wrong / whole) ** 0.5, rel=1e-4)
    assert shares["F32"].error is None
    assert (shares["Q8_0"].tensors, shares["F32"].tensors) == (5, 2)
    assert shares["Q8_0"].bits == 8.5
    assert done.after == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert done.before == sum(values.nbytes for values in ARRAYS.values())


def test_metadata_is_as_llama_cpp_writes_it(model: Path, tmp_path: Path) -> None:
    matrix = ImportanceMatrix({"output.weight": importance(64)}, ["text.txt"], 7)
    options = QuantizeOptions("Q4_1", importance=matrix, importance_file="a.gguf")
    done = quantize(model, tmp_path / "new.gguf", options)
    assert done.notes[-1] == (
        "the importance matrix lacks blk.0.attn_v.weight and 2 others: their columns count equally"
    )
    with open_gguf(tmp_path / "new.gguf") as file:
        assert file.metadata == {
            **{key: value for key, value in KEYS.items() if key != "general.file_type"},
            "general.quantization_version": 2,
            "general.file_type": 3,
            "quantize.imatrix.file": "a.gguf",
            "quantize.imatrix.dataset": "text.txt",
            "quantize.imatrix.entries_count": 1,
            "quantize.imatrix.chunks_count": 7,
        }
        assert list(file.metadata)[-6:-4] == ["general.quantization_version", "general.file_type"]


def test_copy_joins_a_split_model_and_changes_nothing(model: Path, tmp_path: Path) -> None:
    parts = split_model(model, tmp_path / "parts.gguf", 3)
    quantize(parts[0], tmp_path / "new.gguf", QuantizeOptions("COPY"))
    with open_gguf(tmp_path / "new.gguf") as new, open_gguf(model) as old:
        assert new.metadata == old.metadata
        assert new.fingerprint() == old.fingerprint()
        assert all(np.array_equal(new.load(name).data, old.load(name).data) for name in old.tensors)


def test_wishes(model: Path, tmp_path: Path) -> None:
    wishes = Wishes(
        output="F16",
        token_embd="Q5_0",
        patterns=[(re.compile(r"attn_[vq]"), "Q4_1"), (re.compile("v"), "F32")],
    )
    quantize(model, tmp_path / "new.gguf", QuantizeOptions("Q8_0", wishes))
    chosen = types(tmp_path / "new.gguf")
    assert chosen == {
        "output.weight": "F16",
        "token_embd.weight": "Q5_0",
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_v.weight": "Q4_1",
        "blk.0.ffn_down_exps.weight": "Q8_0",
        "blk.0.ffn_gate_inp.weight": "F32",
        "blk.1.attn_q.weight": "Q4_1",
    }


def test_rows_that_do_not_fit_are_told(model: Path, tmp_path: Path) -> None:
    done = quantize(model, tmp_path / "new.gguf", QuantizeOptions("TQ2_0"))
    assert done.notes == [
        "token_embd.weight is Q5_0: rows of 64 weights, where Q4_K needs a multiple of 256",
        "blk.0.attn_v.weight and 1 others are Q4_0: rows of 64 weights, where TQ2_0 needs a multiple of 256",
        "blk.0.ffn_down_exps.weight is Q4_0: rows of 96 weights, where TQ2_0 needs a multiple of 256",
    ]


# --- importance ---


def importance(columns: int, experts: int = 1) -> Importance:
    """Sums over 2 tokens."""
    return Importance(RANDOM.random((experts, columns)).astype(np.float32), np.full(experts, 2, np.float32))


class QuantiseRequests:
    """Returns the requests to quantise_rows, by the values of a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[bytes, Floats | None] = {}
        monkeypatch.setattr(quantization, "quantise_rows", self.quantise)
        monkeypatch.setattr(rewriting, "PIECE_WEIGHTS", 96 * 5)  # 5 rows: pieces cross experts

    def quantise(
        self, values: Floats, type: BlockType, importance: Floats | None, threads: int | None = None
    ) -> Bytes:
        for row in values:
            self.rows[row.tobytes()] = importance
        return quantise(values, type).data


def test_each_expert_has_its_own_importance(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = QuantiseRequests(monkeypatch)
    known = importance(96, experts=3)
    matrix = ImportanceMatrix({"blk.0.ffn_down_exps.weight": known})
    quantize(model, tmp_path / "new.gguf", QuantizeOptions("Q8_0", importance=matrix))
    for expert, rows in enumerate(ARRAYS["blk.0.ffn_down_exps.weight"]):
        for row in rows:
            assert np.array_equal(requests.rows[row.tobytes()], known.sums[expert] / 2)
    assert requests.rows[ARRAYS["output.weight"][7].tobytes()] is None


@pytest.mark.parametrize("powerinfer", [False, True])
def test_a_row_of_a_neuron_counts_alike(
    powerinfer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A down matrix by neuron, (neurons, outputs): importance is of neurons, one number for a row."""
    requests = QuantiseRequests(monkeypatch)
    name = "blk.0.ffn_down_t.weight" if powerinfer else "blk.0.ffn_down.weight"
    down = RANDOM.normal(size=(96, 64)).astype(np.float32)
    up = RANDOM.normal(size=(96, 64)).astype(np.float32)
    keys = KEYS if powerinfer else KEYS | {"hotcold.ffn.down_layout": "by_neuron"}
    tensors = {name: quantise(down, "F32"), "blk.0.ffn_up.weight": quantise(up, "F32")}
    write_gguf(tmp_path / "model.gguf", keys, tensors, magic="PWRI" if powerinfer else "GGUF")
    known = {"blk.0.ffn_up.weight": importance(64)}
    options = QuantizeOptions("Q8_0", importance=ImportanceMatrix(known))
    done = quantize(tmp_path / "model.gguf", tmp_path / "new.gguf", options)
    assert not any("lacks" in note for note in done.notes)
    assert np.array_equal(requests.rows[down[5].tobytes()], np.ones(64))
    assert np.array_equal(requests.rows[up[5].tobytes()], known["blk.0.ffn_up.weight"].sums[0] / 2)
    known["blk.0.ffn_down.weight"] = importance(64)
    options = QuantizeOptions("Q8_0", importance=ImportanceMatrix(known))
    with pytest.raises(ImatrixError, match=r"matrix of blk\.0\.ffn_down(_t)?\.weight has 64 values"):
        quantize(tmp_path / "model.gguf", tmp_path / "other.gguf", options)


def test_arrays_in_the_place_of_other_values(tmp_path: Path) -> None:
    """They say nothing; a file's importance matrix is used as if the keys were not there."""
    keys = KEYS | {"hotcold.ffn.down_layout": [1, 2], "llama.attention.head_count": [math.nan, 1.0]}
    values = quantise(RANDOM.normal(size=(96, 64)).astype(np.float32), "F32")
    write_gguf(tmp_path / "model.gguf", keys, {"blk.0.ffn_down.weight": values})
    known = ImportanceMatrix({"blk.0.ffn_down.weight": importance(64)})
    quantize(tmp_path / "model.gguf", tmp_path / "new.gguf", QuantizeOptions("Q4_K_M", importance=known))


# --- PowerInfer's files, and Hotcold's ---


def test_powerinfers_files_stay_so(tmp_path: Path) -> None:
    shapes = {"blk.0.fc1.weight": (32, 64), "blk.0.fc2.weight": (96, 32), "blk.0.ffn_down_t.weight": (96, 64)}
    tensors = {name: quantise(RANDOM.normal(size=shape), "F16") for name, shape in shapes.items()}
    write_gguf(tmp_path / "model.gguf", KEYS | {"powerinfer.sparse_threshold": 0.5}, tensors, magic="PWRI")
    done = quantize(tmp_path / "model.gguf", tmp_path / "a.gguf", QuantizeOptions("Q4_0"))
    assert not done.notes
    done = quantize(
        tmp_path / "model.gguf", tmp_path / "b.gguf", QuantizeOptions("Q5_0", Wishes(predictor="Q8_0"))
    )
    assert done.notes == ["PowerInfer's own programs compute only F16 and Q4_0; Hotcold computes this file"]
    with open_gguf(tmp_path / "a.gguf") as a, open_gguf(tmp_path / "b.gguf") as b:
        assert a.magic == b.magic == "PWRI"
        assert a.metadata["powerinfer.sparse_threshold"] == 0.5
        assert {info.type.name for info in a.tensors.values()} == {"Q4_0"}
        assert [b.tensors[name].type.name for name in shapes] == ["Q8_0", "Q8_0", "Q5_0"]


def test_the_built_in_model_keeps_its_values_in_f32_and_back(tmp_path: Path) -> None:
    """Its down matrices lie by neuron. F32 holds every value of Q8_0, and Q8_0 finds its scales again."""
    quantize(model_path(), tmp_path / "f32.gguf", QuantizeOptions("F32", allow_requantize=True))
    quantize(tmp_path / "f32.gguf", tmp_path / "q8_0.gguf", QuantizeOptions("Q8_0"))
    with open_gguf(model_path()) as old, open_gguf(tmp_path / "f32.gguf") as wide:
        for name in old.tensors:
            assert np.array_equal(old.load(name).dequantise(), wide.load(name).dequantise())
    with open_gguf(tmp_path / "q8_0.gguf") as new, open_gguf(model_path()) as old:
        assert new.stored_metadata() == old.stored_metadata()
        assert new.fingerprint() == old.fingerprint()


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (QuantizeOptions("Q9_Z"), r"type 'Q9_Z' is not one of F32, F16, .*, COPY"),
        (
            QuantizeOptions("Q8_0", Wishes(patterns=[(re.compile("attn_w"), "F16")])),
            r"model\.gguf: `tensor_type` attn_w=F16 matches none of the 5 tensors that can be quantised",
        ),
        (QuantizeOptions("Q8_0", Wishes(predictor="F16")), "`predictor_type`: the file has no predictors"),
        (QuantizeOptions("Q2_K_S"), "type Q2_K_S has so few bits that it needs `imatrix`"),
        (
            QuantizeOptions("Q8_0", importance=ImportanceMatrix({"blk.7.ffn_up.weight": importance(64)})),
            "importance matrix has 1 tensors, and none is quantised here: it belongs to another model",
        ),
    ],
    ids=["type", "pattern", "predictor", "few bits", "other model"],
)
def test_options_that_do_not_fit(model: Path, options: QuantizeOptions, pattern: str) -> None:
    with pytest.raises(QuantizeError, match=pattern):
        quantize(model, model.with_name("new.gguf"), options)
    assert [path.name for path in model.parent.iterdir()] == ["model.gguf"]


def test_a_matrix_with_a_factor_keeps_to_types_that_have_some(tmp_path: Path) -> None:
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    kind = BLOCK_TYPES["NVFP4"]
    matrix = Tensor(kind, (2, 256), np.ones((2, 4 * kind.nbytes), np.uint8))
    tensors: dict[str, Any] = {"blk.0.ffn_up.weight": matrix}
    allowed = QuantizeOptions("Q4_0", allow_requantize=True, force=True)
    write_gguf(old, KEYS, tensors)
    quantize(old, new, allowed)
    write_gguf(old, KEYS, tensors | {"blk.0.ffn_up.scale": quantise(np.ones(1), "F32")})
    with pytest.raises(QuantizeError, match=r"ffn_up\.scale multiplies .* would become Q4_0"):
        quantize(old, new, allowed)


def test_a_quantised_file_is_quantised_again_only_if_allowed(tmp_path: Path) -> None:
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    tensors: dict[str, Any] = {
        "a.weight": quantise(np.ones((2, 32)), "F16"),
        "b.weight": quantise(np.ones((2, 32)), "Q8_0"),
    }
    write_gguf(old, KEYS, tensors)
    with pytest.raises(
        QuantizeError, match=r"tensor b\.weight is Q8_0 already, and would lose accuracy twice"
    ):
        quantize(old, new, QuantizeOptions("Q4_0"))
    quantize(old, new, QuantizeOptions("Q4_0", allow_requantize=True))
    assert types(new) == {"a.weight": "Q4_0", "b.weight": "Q4_0"}
    quantize(old, new, QuantizeOptions("Q8_0", force=True))
    assert types(new) == {"a.weight": "Q8_0", "b.weight": "Q8_0"}
    unread = NewTensor(GGML_TYPES[15], (2, 256), lambda: [np.zeros((2, 292), np.uint8)])
    write_gguf(old, KEYS, {"c.weight": unread})
    with pytest.raises(QuantizeError, match=r"tensor c\.weight is Q8_K, which cannot be decoded"):
        quantize(old, new, QuantizeOptions("Q4_0", allow_requantize=True, force=True))
    quantize(old, new, QuantizeOptions("COPY", force=True))
    assert types(new) == {"c.weight": "Q8_K"}
