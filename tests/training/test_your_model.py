"""The commands of docs/your_model.md, run one after the other on a tiny checkpoint and a small text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.checkpoints import copy_checkpoint
from support.served import served

from hotcold.commands import cli
from hotcold.formats.gguf import open_gguf
from hotcold.tasks import fitting

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

ROOT = Path(__file__).resolve().parents[2]
#: Options that the page leaves at sizes of large models.
SMALLER = {
    "sparsify": ["--context", "48", "--batch", "4", "--learning-rate", "3e-3", "--device", "cpu"],
    "fit-predictor": ["-c", "64", "--max-share", "0.9"],
    "profile": ["-c", "64"],
    "perplexity": ["-c", "64"],
}


def commands() -> list[list[str]]:
    text = (ROOT / "docs" / "your_model.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)  # "Eight commands"
    assert block
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    return [words[1:] for words in lines if words[0] == "hotcold"]


@pytest.mark.full
def test_the_commands_of_the_page_lead_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "_ROUNDS", 1)
    data = ROOT / "tests" / "data"
    copy_checkpoint(tmp_path).rename("CHECKPOINT")
    text = (data / "heidi.txt").read_text(encoding="utf-8")
    Path("text.txt").write_text(text[:20000], encoding="utf-8")
    Path("held_out.txt").write_text(text[-4000:], encoding="utf-8")
    given = commands()
    assert len(given) == 8
    *steps, serve = given
    outputs: dict[str, str] = {}
    for verb, *words in steps:
        words = ["6000" if word == "1000000000" else word for word in words]
        assert cli.main([verb, *words, *SMALLER.get(verb, [])]) == 0, capsys.readouterr().err
        said = capsys.readouterr()
        outputs[verb] = said.out
        if verb == "sparsify":
            assert max(map(len, (said.out + said.err).splitlines())) <= 80
            assert len((said.out + said.err).splitlines()) < 32
    assert re.search(r"sparse:  +\d+\.\d\d, \d\.\d+ of the original's\n", outputs["sparsify"])
    assert re.search(r"^zeros \d\d\.\d%, thresholds", outputs["sparsify"], re.MULTILINE)
    with open_gguf(Path("model.gguf")) as file:
        assert file.metadata["hotcold.ffn.activation"] == "drelu"
        assert file.tensors["blk.0.attn_q.weight"].type.name == "Q4_0"
    assert "generation: exact" in outputs["fit-predictor"]
    assert re.search(r"neurons active: 0\.[0-3]", outputs["perplexity"])
    with served(*serve[1:], environment={"HOTCOLD_GPU": "off"}) as server, server.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "Heidi", "max_tokens": 4})
        assert reply.json()["usage"]["completion_tokens"] <= 4
