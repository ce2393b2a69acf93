"""Checkpoints in FP8 against transformers, which dequantises them itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import copy_checkpoint
from support.quantised import fp8, quantised_pair
from support.runner import Runner

from hotcold.convert import ConvertOptions, convert
from hotcold.kernels import open_backend

#: Sizes that are whole blocks; transformers misreads blocks that are cut, as those of the second table are.
SIZES: dict[str, dict[str, Any]] = {
    "tiny-deepseek3": {
        "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "kv_lora_rank": 96,
        "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "tiny-minimax-m2": {
        "hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
CUT: dict[str, dict[str, Any]] = {
    "tiny-deepseek3": {"hidden_size": 200, "intermediate_size": 300, "moe_intermediate_size": 136},
    "tiny-minimax-m2": {"hidden_size": 200, "intermediate_size": 136},
}  # fmt: skip
DECLARED = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "gate", "e_score_correction_bias"],
}  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_transformers(
    name: str, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dequantises whole blocks itself, and gets the values of blocks that are cut."""
    transformers = pytest.importorskip("transformers", reason="transformers dequantises FP8")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    folder = copy_checkpoint(tmp_path, name)
    stated = json.loads((folder / "config.json").read_text())
    stated |= (CUT if cut else SIZES)[name]
    (folder / "config.json").write_text(json.dumps(stated))
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape) * (0.08 if each.ndim > 1 else 0.2) + (each.ndim == 1))
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").rename(folder / "model.safetensors")
    folder, plain = quantised_pair(folder, fp8((128, 128)), DECLARED)

    # transformers asks for accelerate, which it does not need where one device has all.
    quantizer = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
    monkeypatch.setattr(quantizer, lambda: True)
    dequantise = {} if cut else {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        plain if cut else folder, dtype=torch.float32, attn_implementation="eager", **dequantise
    )
    prompt = np.arange(3, 35, dtype=np.int32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(prompt[None].astype(np.int64))).logits[0].numpy()
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F32"))
    logits = Runner(tmp_path / "out.gguf", open_backend("reference"), cache_type="f32").run(prompt)
    np.testing.assert_allclose(logits, wanted, atol=2e-4 * np.abs(wanted).max())
