"""Tokenizer metadata: trained pieces, added tokens, special ids, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import change_config, copy_checkpoint
from support.vocabularies import as_read

from hotcold.convert import ConvertError, convert
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.tokenizer.tokenizer import Tokenizer


def metadata(folder: Path, size: int = 288) -> dict[str, Any]:
    values = vocabulary_metadata(open_checkpoint(folder), size)
    return {key.removeprefix("tokenizer."): value for key, value in values.items()}


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def test_trained_pieces(tmp_path: Path) -> None:
    values = metadata(copy_checkpoint(tmp_path))
    assert values["ggml.model"] == "llama"
    assert values["ggml.tokens"][:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert values["ggml.tokens"][259] == "\u2581"
    assert values["ggml.token_type"][[0, 1, 2, 3, 258, 259]].tolist() == [2, 3, 3, 6, 6, 1]
    assert values["ggml.scores"][260] == -1.0
    assert (values["ggml.unknown_token_id"], values["ggml.bos_token_id"], values["ggml.eos_token_id"]) == (
        0,
        1,
        2,
    )
    assert "ggml.padding_token_id" not in values
    assert values["ggml.add_bos_token"] is True and values["ggml.add_eos_token"] is False


def test_added_tokens_and_padding_of_the_vocabulary(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    write_json(folder / "added_tokens.json", {"<plain>": 289, "<s>": 1})
    decoder = {
        "1": {"content": "<changed>", "special": True},  # below the trained pieces: those stand
        "290": {"content": "<|im_end|>", "special": True},
        "291": {"content": "word", "special": False},
    }
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder, "add_bos_token": False})
    values = metadata(folder, 293)
    assert values["ggml.tokens"][288:] == ["[PAD288]", "<plain>", "<|im_end|>", "word", "[PAD292]"]
    assert values["ggml.tokens"][1] == "<s>"
    assert values["ggml.token_type"][288:].tolist() == [5, 4, 3, 4, 5]
    assert len(values["ggml.scores"]) == 293
    assert values["ggml.add_bos_token"] is False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": 260}, {"eos": 260}),
        ({"eos_token_id": [261, 2]}, {"eos": 261}),
        ({"bos_token_id": None}, {"bos": 1}),
        ({"pad_token_id": -1}, {"padding": None}),
        ({"pad_token_id": 0}, {"padding": 0}),
    ],
)
def test_config_overrules_special_ids(
    changes: dict[str, Any], expected: dict[str, int | None], tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, **changes)
    values = metadata(folder)
    assert {name: values.get(f"ggml.{name}_token_id") for name in expected} == expected


def test_a_missing_model(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ConvertError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        metadata(folder)


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"288 pieces, but config\.json says vocab_size 287"):
        metadata(copy_checkpoint(tmp_path), 287)


def test_unigram_models_and_others(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    path = folder / "tokenizer.model"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x12\x02\x18\x01" + b"\x1a\x04\x12\x02ab")  # UNIGRAM; a table of 2 bytes
    values = metadata(folder)
    assert values["ggml.model"] == "t5" and values["ggml.precompiled_charsmap"].tolist() == [97, 98]
    assert values["ggml.add_bos_token"] is False and values["ggml.add_eos_token"] is True
    path.write_bytes(whole + b"\x12\x02\x18\x03")  # trainer_spec { model_type: WORD }
    with pytest.raises(ConvertError, match="WORD model: BPE or UNIGRAM"):
        metadata(folder)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("added_tokens.json", {"<x>": -1}),
        ("added_tokens.json", {"<x>": "7"}),
        ("added_tokens.json", {"<x>": True}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-1": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 30: {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": 7}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "a"}}),
    ],
)
def test_bad_added_tokens(file: str, values: Any, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    write_json(folder / file, values)
    with pytest.raises(ConvertError, match=f"{file}: added token .* an id from 0 are needed"):
        metadata(folder)


def test_added_tokens_that_the_weights_lack(tmp_path: Path) -> None:
    """Gemma 3 1B's for images: both files name it, and no row of the embedding is its own."""
    folder = copy_checkpoint(tmp_path)
    before = metadata(folder)
    write_json(folder / "added_tokens.json", {"<image>": 288})
    decoder = {"288": {"content": "<image>", "special": True}, "2": {"content": "</s>", "special": True}}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder})
    notes: list[str] = []
    after = vocabulary_metadata(open_checkpoint(folder), 288, notes)
    assert after["tokenizer.ggml.tokens"] == before["ggml.tokens"]
    note = "an added token is left out, since the weights have 288 tokens: '<image>' with id 288"
    assert notes == [note]
    write_json(folder / "added_tokens.json", {"<image>": 288, "<more>": 10**30})
    assert convert(folder, tmp_path / "out.gguf").notes[0].startswith("2 added tokens are left out")


def test_special_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    before = metadata(folder)
    change_config(folder, bos_token_id=288, eos_token_id=[300, 261], pad_token_id=1 << 20)
    notes: list[str] = []
    values = vocabulary_metadata(open_checkpoint(folder), 288, notes)
    assert values["tokenizer.ggml.bos_token_id"] == before["ggml.bos_token_id"]
    assert values["tokenizer.ggml.eos_token_id"] == 261
    assert "tokenizer.ggml.padding_token_id" not in values
    left = [("bos_token_id", 288), ("pad_token_id", 1 << 20), ("eos_token_id", 300)]
    problem = "is left out, since the weights have 288 tokens"
    assert notes == [f"config.json: {key} {id} {problem}" for key, id in left]


END = ["<|im_end|>", "<a>", "<b>", "<c>", "<d>"]  # ids from 288 on


@pytest.mark.parametrize(
    ("config", "generation", "eos", "others", "own"),
    [
        ([2, 289], None, 2, [289], None),
        (2, [2, 289, 290], 2, [289, 290], None),
        ([289, 2], [288, 289, 2], 289, [], None),  # the others are found by their names
        (None, [289, 288], 289, [], None),
        (2, 289, 2, [289], None),
        ([2, 289, 290, 291, 292], [288, 291], 2, [289, 290], [291, 292]),
        (2, [-1], 2, [], None),
    ],
)
def test_lists_of_tokens_that_end_a_text(
    config: Any, generation: Any, eos: int, others: list[int], own: list[int] | None, tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path)
    write_json(folder / "added_tokens.json", {text: 288 + i for i, text in enumerate(END)})
    change_config(folder, eos_token_id=config, vocab_size=293)
    if generation is not None:
        write_json(folder / "generation_config.json", {"eos_token_id": generation})
    notes: list[str] = []
    values = vocabulary_metadata(open_checkpoint(folder), 293, notes)
    found = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    assert found == [eos, *others, None, None][:3]
    key = "hotcold.tokenizer.end_token_ids"
    assert (values[key].tolist() if key in values else None) == own
    assert bool(notes) == (own is not None)
    # A reader of the file ends at all of them.
    listed = {id for part in (config, generation) for id in (part if isinstance(part, list) else [part])}
    assert {id for id in listed if id and id > 0} <= Tokenizer.from_metadata(as_read(values)).stop_ids


def test_a_damaged_generation_config_is_left_out(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    before = vocabulary_metadata(open_checkpoint(folder), 288)
    (folder / "generation_config.json").write_text("{")
    notes: list[str] = []
    after = vocabulary_metadata(open_checkpoint(folder), 288, notes)
    assert after.keys() == before.keys()
    assert len(notes) == 1 and "generation_config.json is not valid JSON" in notes[0]


FLAGS = {"content": "<|user|>", "special": True, "rstrip": True, "lstrip": False, "single_word": False}
WORD = {"content": "word", "special": False, "rstrip": False, "lstrip": True, "single_word": True}


def test_flags_of_added_tokens(tmp_path: Path) -> None:
    """The flags come from tokenizer_config.json, or from tokenizer.json where the first is silent."""
    folder = copy_checkpoint(tmp_path)
    assert not [key for key in metadata(folder, 290) if "strip" in key]
    write_json(folder / "added_tokens.json", {"<|user|>": 288, "word": 289})
    write_json(
        folder / "tokenizer.json",
        {"added_tokens": [{"id": 288, **FLAGS}, {"id": 289, **WORD}, 7, {"id": "x"}]},
    )
    found = vocabulary_metadata(open_checkpoint(folder), 290)
    names = ("lstrip", "rstrip", "single_word")
    assert [found[f"hotcold.tokenizer.{name}"].tolist() for name in names] == [[289], [288], [289]]
    decoder = {"288": FLAGS, "289": {**WORD, "lstrip": False}, "1": {"content": "<other>", "rstrip": True}}
    folder = folder.rename(tmp_path / "other")
    write_json(
        folder / "tokenizer_config.json",
        {"added_tokens_decoder": {key: decoder[key] for key in ("288", "289")}},
    )
    found = vocabulary_metadata(open_checkpoint(folder), 290)
    assert [key for key in found if key.startswith("hotcold.")] == [
        "hotcold.tokenizer.rstrip", "hotcold.tokenizer.single_word",
    ]  # fmt: skip


def test_a_name_implies_no_flags_where_the_checkpoint_denies_them(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    general = {"general.name": "Phi-3-tuned", "general.architecture": "llama"}
    silent = vocabulary_metadata(open_checkpoint(folder), 288, None, general)
    assert "hotcold.tokenizer.rstrip" not in silent
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "</s>"}}})
    denied = vocabulary_metadata(open_checkpoint(folder), 288, None, general)
    assert denied["hotcold.tokenizer.rstrip"].tolist() == []
    text = "a</s> a"
    stripped, kept = (
        Tokenizer.from_metadata(as_read({**general, **found})).encode(text, parse_special=True)
        for found in (silent, denied)
    )
    assert len(kept) == len(stripped) + 1


def test_added_tokens_that_were_trained_are_found_by_their_names(tmp_path: Path) -> None:
    """As in transformers and in llama.cpp's files."""
    folder = copy_checkpoint(tmp_path)
    before = metadata(folder)
    id = next(i for i, type in enumerate(before["ggml.token_type"]) if type == 1)
    decoder = {str(id): {"content": before["ggml.tokens"][id], "special": False}}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": decoder})
    assert metadata(folder)["ggml.token_type"][id] == 4
