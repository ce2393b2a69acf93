"""``hotcold quantize``: what it prints, its options, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import golden_checkpoint

from hotcold.commands import cli
from hotcold.convert import ConvertOptions, convert
from hotcold.formats.gguf import open_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    convert(golden_checkpoint("tiny-llama"), path, ConvertOptions("F32"))
    return path


def test_the_table_and_the_summary(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.gguf"
    assert cli.main(["quantize", str(model), str(output), "q4_0", "--rms", "--json", "-t", "2"]) == 0
    out, err = capsys.readouterr()
    *table, last, summary = out.splitlines()
    assert all(len(line) <= 80 for line in table)
    assert table[0].split() == [
        "type",
        "tensors",
        "before",
        "after",
        "bits/weight",
        "relative",
        "RMS",
        "error",
    ]
    assert [line.split()[0] for line in table[1:]] == list(json.loads(summary)["types"])
    assert last.startswith(f"{output}: Q4_0, ")
    report = json.loads(summary)
    with open_gguf(output) as file:
        assert report["bytes"] == sum(info.nbytes for info in file.tensors.values())
        for type, share in report["types"].items():
            infos = [info for info in file.tensors.values() if info.type.name == type]
            assert (share["tensors"], share["bytes"]) == (len(infos), sum(info.nbytes for info in infos))
    assert 0.01 < report["types"]["Q4_0"]["relative_rms_error"] < 0.2
    assert [f"note: {note}" for note in report["notes"]] == err.splitlines()


def test_options(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    options = ["--tensor-type", "attn_v=f16", "--tensor-type", "ffn=Q5_1", "--token-embedding-type", "q8_0"]
    assert cli.main(["quantize", str(model), str(output), "Q4_1", "--leave-output-tensor", *options]) == 0
    with open_gguf(output) as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
    assert types["output.weight"] == "F32"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_v.weight"] == "F16"
    assert types["blk.1.ffn_up.weight"] == "Q5_1"
    assert types["blk.1.attn_k.weight"] == "Q4_1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["Q4_K_X"], "'Q4_K_X' is not one of F32, F16"),
        (["Q8_0", "--tensor-type", "attn"], "'attn' is not of the form PATTERN=TYPE, such as attn_v=q8_0"),
        (["Q8_0", "--tensor-type", "[=q8_0"], "'[' is not a regular expression"),
        (["Q8_0", "--tensor-type", "a=q9"], "'q9' is not one of F32, F16"),
        (["Q8_0", "--tensor-type", "nothing=f16"], "--tensor-type nothing=F16 matches none of the"),
        (["Q8_0", "--predictor-type", "f16"], "--predictor-type: the file has no predictors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quantize", str(model), str(tmp_path / "out.gguf"), *options]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and not out
    assert not list(tmp_path.iterdir())


def test_a_quantised_file_needs_the_flag(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, twice = tmp_path / "q8.gguf", tmp_path / "q4.gguf"
    assert cli.main(["quantize", str(model), str(once), "Q8_0"]) == 0
    assert cli.main(["quantize", str(once), str(twice), "Q4_0"]) == 2
    assert "allow it with --allow-requantize" in capsys.readouterr().err
    assert cli.main(["quantize", str(once), str(twice), "Q4_0", "--allow-requantize"]) == 0
    assert cli.main(["quantize", str(model), str(twice), "Q4_0"]) == 2
    assert "the file exists: give another name, or --force to replace it" in capsys.readouterr().err
