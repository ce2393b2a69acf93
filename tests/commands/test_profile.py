"""`hotcold profile`: counts that agree with the model's definition, its file and picture, its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.plain_forward import Model
from support.torch_files import vector, write

from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.model.config import Config
from hotcold.placement.profiles import read_profile
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.ffn_inputs import ffn_inputs
from hotcold.tasks.scoring import cut_windows
from hotcold.tasks.windows import text_windows

TEXT = (
    "The goats had come down from the mountain, and Peter called them with his pipe. The grandfather sat "
    "before the hut and carved a spoon, and Heidi told him everything that she had seen: the great bird, the "
    "fire on the snow, and the flowers that stood so thick that one could not see the grass between them. "
)


def profile(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[list[str], dict[str, Any]]:
    assert cli.main(["profile", *map(str, args), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines, json.loads(last)


def firing(path: Path) -> list[np.ndarray]:
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        return [*read_profile(path, file_sizes(file, config, 64, "f16")).firing]


@pytest.fixture(scope="module")
def active() -> list[np.ndarray]:
    """Per layer ``[windows, tokens, N]``, from the FFN's inputs and float weights, by the definition."""
    model = load(None, LoadOptions(context=64))
    windows = cut_windows(model.tokenizer.encode(TEXT * 2, add_bos=False), 64, model.tokenizer.bos_id)
    assert len(windows) == 2
    layers = []
    with open_gguf(model_path()) as file:
        for i, inputs in enumerate(ffn_inputs(model, windows, {"normed"})):
            gate, up = (file.load(f"blk.{i}.ffn_{name}.weight").dequantise() for name in ("gate", "up"))
            both = (inputs["normed"] @ gate.T > 0) & (inputs["normed"] @ up.T > 0)
            layers.append(both.reshape(2, 63, -1))
    return layers


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_active_neurons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], active: list[np.ndarray], backend: str
) -> None:
    """Inputs are rounded to 8 bits before the dots, so a few gates near zero fall on the other side."""
    text, out = tmp_path / "goats.txt", tmp_path / "x.profile.gguf"
    text.write_text(TEXT * 2)
    lines, report = profile(capsys, "-f", text, "-o", out, "-c", 64, "--backend", backend)
    assert lines[0] == "fable-7m-q8_0: goats.txt, 126 tokens" and len(lines) == 9
    assert report["tokens"] == 126 and "union_64" not in report, "windows have 63 tokens"
    for i, (found, expected) in enumerate(zip(firing(out), active, strict=True)):
        wrong = np.abs(found - expected.mean((0, 1))).sum() / expected.mean((0, 1)).sum()
        assert wrong < 0.03 and report["active"][i] == pytest.approx(found.mean(), rel=0.001)
        most = np.sort(found)[::-1][:204].sum() / found.sum()
        assert report["hottest_fifth"][i] == pytest.approx(most, rel=0.001)
        again = (expected[:, 1:] & expected[:, :-1]).sum() / expected[:, 1:].sum()
        assert report["overlap"][i] == pytest.approx(again, rel=0.05)
        runs = [window[at : at + 32].any(0).mean() for window in expected for at in range(32)]
        assert report["union_32"][i] == pytest.approx(np.mean(runs), rel=0.02)
    with open_gguf(out) as file:
        assert file.metadata["hotcold.profile.tokens"] == 126
        assert file.metadata["hotcold.profile.union_32"].tolist() == pytest.approx(report["union_32"])


def test_without_bos_where_the_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A window then is 64 tokens of text, where BOS takes the place of one."""
    text, model = tmp_path / "text", tmp_path / "m.gguf"
    words = TEXT * 6 + "And here it ends."
    text.write_text(words)
    tokens = len(load(None, LoadOptions(context=64)).tokenizer.encode(words, add_bos=False))
    assert tokens // 63 != tokens // 64
    with open_gguf(model_path()) as file:
        tensors = {name: file.load(name) for name in file.tensors}
        write_gguf(model, file.metadata | {"tokenizer.ggml.add_bos_token": False}, tensors)
    for path, size in ((model_path(), 63), (model, 64)):
        _, report = profile(capsys, "-m", path, "-f", text, "-o", tmp_path / f"{size}", "-c", 64)
        assert report["tokens"] == tokens // size * 63


def test_some_of_a_long_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows from the whole of it, also where more than half of them are wanted: its end is other words."""
    text = tmp_path / "text"
    text.write_text(TEXT * 4 + "Once upon a time there was a cat. " * 100)
    model = load(None, LoadOptions(context=64))
    windows = text_windows(model.tokenizer, text.read_text(), 64)
    wanted = len(windows) * 2 // 3
    _, report = profile(capsys, "-f", text, "-o", tmp_path / "x", "-c", 64, "--tokens", wanted * 64)
    assert report["tokens"] == wanted * 63
    chosen = [windows[i * len(windows) // wanted] for i in range(wanted)]
    inputs = ffn_inputs(model, chosen, {"normed"})
    with open_gguf(model_path()) as file:
        for i, (found, layer) in enumerate(zip(firing(tmp_path / "x"), inputs, strict=True)):
            gate, up = (file.load(f"blk.{i}.ffn_{name}.weight").dequantise() for name in ("gate", "up"))
            expected = ((layer["normed"] @ gate.T > 0) & (layer["normed"] @ up.T > 0)).mean(0)
            assert np.abs(found - expected).sum() / expected.sum() < 0.03


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, picture = tmp_path / "text", tmp_path / "x.svg"
    text.write_text(TEXT)
    profile(capsys, "-f", text, "-o", tmp_path / "x", "-c", 64, "--picture", picture)
    svg = ElementTree.parse(picture).getroot()
    names = [each.text for each in svg.findall(".//{*}text")]
    assert {"layer 0", "layer 5", "0.01 %", "100 %", "neurons of the layer, the most active first"} <= {
        *names
    }
    lines = [each.get("points") for each in svg.findall(".//{*}polyline")]
    assert len(lines) == 6
    for line, shares in zip(lines, firing(tmp_path / "x"), strict=True):
        assert line is not None
        x, y = np.array([point.split(",") for point in line.split()], float).T
        assert (np.diff(x) > 0).all() and (np.diff(y) >= 0).all()
        drawn = 10 ** (-4 * (y - 40) / 340)  # four decades from 40 to 380
        assert drawn[0] == pytest.approx(shares.max(), rel=0.01)
        assert drawn[-1] == pytest.approx(max(1e-4, shares.min()), rel=0.01)


def test_powerinfers_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.random.default_rng(0).integers(0, 500, (6, 1024)).astype("<f4")
    (tmp_path / "in").mkdir()
    for i, row in enumerate(counts):
        write(tmp_path / "in" / f"activation_{i}.pt", vector(length=1024, size=1024), row.tobytes())
    lines, report = profile(capsys, "--import", tmp_path / "in", "-o", tmp_path / "x", "--tokens", 1000)
    assert lines[0] == "fable-7m-q8_0: PowerInfer's counts, in" and "overlap" not in report
    np.testing.assert_allclose(np.array(firing(tmp_path / "x")) * 1000, counts, rtol=1e-3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-o x", "one of the arguments -f/--file --import is required"),
        ("-f text --import in -o x", "not allowed with argument"), ("-f text", "are required: -o/--output"),
        ("-f text -o text", "text: the file exists: give another name, or --force to replace it"),
        ("-f text -o no/x", "no/x: no is not a folder: create it first"),
        ("-f text -o x --tokens 0", "number from 1"),
        ("-f text -o x --picture text", "text: the file exists: give another name, or"),
        ("-f text -o x -m silu.gguf", "activation silu gives no zeros: relu, drelu, relu2 can be profiled"),
        ("-f empty -o x", "the text has 0 tokens: at least 1 needed"), ("-f no -o x", "no: No such file"),
        ("--import no -o x", "No such file"), ("--import text -o x", "Not a directory"),
        ("--import . -o x", "missing activation_0.pt, activation_1.pt, activation_2.pt"),
    ],
)  # fmt: skip
def test_mistakes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text(TEXT, encoding="utf-8")
    Path("empty").touch()
    Model().write(Path("silu.gguf"))
    assert cli.main(["profile", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert not Path("x").exists()
