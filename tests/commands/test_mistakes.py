"""Every mistake that a user of the command line can make: one line on stderr, exit code 2, no partial file.

Flags are read from the parsers, so that a new one is tested too. test_endings.py has what comes from outside.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import golden_checkpoint

from hotcold.commands import cli
from hotcold.commands.command_line import parser_of
from hotcold.demo import model_path
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.runtime import loading, memory
from hotcold.tasks import doctor

CHECKPOINT = str(golden_checkpoint("tiny-drelu"))
PROMPT = "Once upon a time"

#: A short run of each verb that ends well; ``{text}`` and others are made by ``places``.
GOOD = {
    "generate": ["-p", PROMPT, "-n", "4", "--seed", "1"],
    "info": [],
    "tokenize": ["-p", PROMPT],
    "perplexity": ["-f", "{text}", "-c", "32", "--chunks", "1"],
    "bench": ["-p", "8", "-n", "4", "-r", "1"],
    "fit-predictor": ["-f", "{text}", "-o", "out.predictor.gguf", "-c", "16"],
    "profile": ["-f", "{text}", "-o", "out.profile.gguf", "-c", "16"],
    "plan": [],
    "doctor": [],
    "convert": [CHECKPOINT, "-o", "out.gguf"],
    "quantize": ["{model}", "out.f16.gguf", "f16", "--allow-requantize"],
    "imatrix": ["-f", "{text}", "-o", "out.imatrix.gguf", "-c", "16"],
}
#: Verbs that need more than files, or go on for ever; their mistakes have tests of their own.
ELSEWHERE = {"chat", "embed", "list", "pull", "remove", "serve", "sparsify"}
#: How each verb is given a model.
MODEL = {"generate": ["-m"], "info": [], "tokenize": ["-p", "a", "-m"], "perplexity": ["-f", "{text}", "-m"],
         "bench": ["-m"], "plan": ["-m"],
         "fit-predictor": ["-f", "{text}", "-o", "new.gguf", "-m"],
         "profile": ["-f", "{text}", "-o", "new.gguf", "-m"]}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that are wrong, each in its own way."""
    folder = tmp_path_factory.mktemp("places")
    model = model_path().read_bytes()
    names = ("text", "latin1", "empty", "no_model", "cut_in_header", "cut_in_metadata", "cut_in_tensors")
    paths = {name: folder / f"{name}.gguf" for name in (*names, "fifo", "i16", "no_tensor", "model")}
    paths["model"].write_bytes(model)
    paths["text"].write_text("The goats had come down from the mountain, and Peter called them. " * 5)
    paths["latin1"].write_bytes("Käse".encode("latin-1"))
    paths["empty"].write_bytes(b"")
    paths["no_model"].write_bytes(b"\x7fELF" * 100)
    for name, size in (("header", 20), ("metadata", 5000), ("tensors", len(model) // 2)):
        paths[f"cut_in_{name}"].write_bytes(model[:size])
    os.mkfifo(paths["fifo"])
    with open_gguf(model_path()) as file:
        tensors = {name: file.load(name) for name in file.tensors}
        del tensors["blk.3.ffn_up.weight"]
        write_gguf(paths["no_tensor"], file.metadata, tensors)
        write_gguf(paths["i16"], file.metadata, {**tensors, "blk.3.ffn_up.weight": quantise(BLOCKS, "F16")})
    data = bytearray(paths["i16"].read_bytes())
    at = data.index(b"blk.3.ffn_up.weight") + len(b"blk.3.ffn_up.weight") + 4 + 16
    data[at : at + 4] = (25).to_bytes(4, "little")  # I16, which is as long
    paths["i16"].write_bytes(data)
    return paths | {"folder": folder, "below": paths["text"] / "below", "missing": folder / "missing"}


BLOCKS = np.ones((1024, 256), np.float32)


@pytest.fixture
def places(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The same, with an empty folder to be in, and for doctor a cache of its own and little to measure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made["folder"] / "cache"))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    return made


def filled(arguments: list[str], places: dict[str, Path]) -> list[str]:
    return [argument.format(**places) if "{" in argument else argument for argument in arguments]


@pytest.fixture
def parsers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make one takes longer than to read a line with it."""
    monkeypatch.setattr(cli, "parser_of", kept_parser)


kept_parser = cache(parser_of)


def mistake(arguments: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> str:
    """The line that a command line which is wrong gets."""
    before = sorted(Path.cwd().iterdir())
    assert cli.main(arguments) == 2, arguments
    out, err = capsys.readouterr()
    assert out == "", arguments
    assert err.startswith("hotcold: error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert len(err) < 600, err
    for part in parts:
        assert part in err, (arguments, err)
    assert sorted(Path.cwd().iterdir()) == before, "a file was left"
    return err


# --- flags ---


def options_of(verb: str) -> Iterator[argparse.Action]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"hotcold.commands.{verb.replace('-', '_')}").add_arguments(parser)
    yield from (action for action in parser._actions if action.nargs != 0)


FLAGS = [
    (verb, action)
    for verb, _ in cli.VERBS
    for action in options_of(verb)
    if action.option_strings and (action.type is not None or action.choices)
]


@pytest.mark.parametrize("verb", dict.fromkeys(verb for verb, _ in FLAGS))
def test_bad_values_of_every_flag(
    verb: str, places: dict[str, Path], parsers_are_kept: None, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"perplexity": ["-f", "{text}"], "convert": [CHECKPOINT], "quantize": GOOD["quantize"]}
    needed["fit-predictor"] = needed["profile"] = needed["imatrix"] = ["-f", "{text}", "-o", "new.gguf"]
    required = filled(needed.get(verb, []), places)
    for action in (action for owner, action in FLAGS if owner == verb):
        check_bad_values([verb, *required], action, capsys)


def check_bad_values(line: list[str], action: argparse.Action, capsys: pytest.CaptureFixture[str]) -> None:
    flag = action.option_strings[-1]
    values = ["", "a\0b", "x" * 5000]  # no path, no number, no choice
    if not isinstance(action.metavar, str) or action.metavar not in ("FILE", "TEXT", "MODEL_DIR"):
        values += ["nan", "inf", "-1e999", "-7", "9" * 5000, "1e300", "ten", "٣x", " "]
    for value in values:
        assert "\0" not in mistake([*line, f"{flag}={value}"], capsys)
    mistake([*line, flag], capsys, flag, "expected one argument")


def test_every_verb_is_in_the_table() -> None:
    assert set(GOOD) | ELSEWHERE == {verb for verb, _ in cli.VERBS}
    assert {verb for verb, _ in FLAGS} - ELSEWHERE == set(GOOD)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate -n 0", "argument -n/--n-predict/--predict: '0' is not a whole number from 1 to 214748364"),
        ("generate -n -5", "'-5' is not a whole number from 1 to 2147483647, or -1 ("),
        ("generate -n 9999999999999", "'9999999999999' is not a whole number from 1 to 2147483647"),
        ("generate -t 0", "argument -t/--threads: '0' is not a whole number from 1 to 1024"),
        ("generate -t 1025", "argument -t/--threads: '1025' is not a whole number from 1 to 1024, or -1"),
        ("generate -t 2 --backend reference", "backend 'reference' has no thread pool"),
        ("generate -c 1", "argument -c/--ctx-size: '1' is not a whole number from 2 to 2147483647, or 0"),
        ("generate -c 257", "context of 257 positions (-c): this model allows 2 to 256"),
        ("generate --temp nan", "argument --temp/--temperature: 'nan' is not a finite number"),
        ("generate --temp 1e999", "argument --temp/--temperature: '1e999' is not a finite number"),
        ("generate --temp -1", "temperature is -1.0: allowed are 0 to 100"),
        ("generate --top-k -1", "argument --top-k: '-1' is not a whole number from 0"),
        ("generate --top-p 1.5", "top_p is 1.5: allowed are 0 to 1"),
        ("generate --top-p 1.5", "top_p is 1.5: allowed are 0 to 1"),
        ("generate --min-p -0.1", "min_p is -0.1: allowed are 0 to 1"),
        ("generate --repeat-penalty 0", "repeat_penalty is 0.0: allowed are 0.01 to 100"),
        ("generate --seed -2", "argument -s/--seed: '-2' is not a whole number from -1"),
        ("generate --repeat-last-n -2", "argument --repeat-last-n: '-2' is not a whole number from -1"),
        ("generate --logit-bias 5", "'5' is not a token id and a bias such as 15043+1"),
        ("generate -l 5+inf", "'5+inf' is not a token id and a bias such as 15043+1"),
        ("generate -l 5+99999", "logit_bias of token 5 is 99999.0: allowed are -10000 to 10000"),
        ("generate -l 4096-1", "logit_bias has token 4096: allowed are the ids 0 to 4095"),
        ("generate --stop=", "stop holds a string of 0: strings of 1 to 1024 characters are needed"),
        ("generate -ctk q8_0", "-ctk q8_0 and -ctv f16: keys and values must have the same type: give"),
        ("bench -ctk q8_0 -ctv f32", "-ctk q8_0 and -ctv f32: keys and values must have the same type: give"),
        ("plan --cache-type f16 -ctk f32 -ctv f32", "-ctk f32: keys and values must have the same type"),
        ("bench -np 0", "argument -np/--parallel: '0' is not a whole number from 1 to 4096"),
        ("generate --sparsity fast", "invalid choice: 'fast'"),
        ("generate --sparsity predicted", "the file has no predictor"),
        ("generate -p a -f b", "not allowed with argument"),
        ("generate stray", "stray: cannot be opened: No such file or directory"),
        ("generate a stray", "unknown argument 'stray'; a text needs -p ("),
        ("bench a stray", "unknown argument 'stray' ("),
        ("generate a -m b", "the model is given twice, as 'a' and -m b: give it once"),
        ("info a -m b", "the model is given twice"),
        ("generate --tmp 1", "unknown option '--tmp'; did you mean --temp?"),
        ("perplexity", "the following arguments are required: -f/--file"),
        ("perplexity -f {text} -c 1000", "this model allows 2 to 256"),
        ("perplexity -f {text} --compare predicted", "the file has no predictor"),
        ("perplexity -f {text} --compare auto", "invalid choice: 'auto'"),
        ("perplexity -f {empty}", "the text has 0 tokens: at least 1 needed"),
        ("bench -n 1", "'1' is not a whole number from 2"),
        ("bench -p 200 -n 100", "-p 200 and -n 100 need 300 positions: the context holds 256"),
        ("bench -p 128 -n 120 --parallel 16", "16 sequences together, need 263 positions: the context"),
        ("bench -n 2147483647", "need 2147483775 positions: the context holds 256"),
        ("convert", "the following arguments are required: IN"),
        ("convert missing", "missing is not a folder"),
        ("convert {text}", "GGUF or PWRI is needed; this is not a GGUF file"),
        ("info {checkpoint}", "a regular file is needed; `hotcold convert {checkpoint}` makes a GGUF file"),
        ("convert {checkpoint}/model.safetensors", "is not a GGUF file; `hotcold convert {checkpoint}`"),
        ("convert {text} a.gguf", "GGUF or PWRI is needed; this is not a GGUF file"),
        ("convert {folder}", "has no config.json"),
        ("convert {checkpoint} -o {model}", "the file exists: give another name, or --force to replace it"),
        ("convert {checkpoint} -o no/such/folder.gguf", "is not a folder: create it first"),
        ("convert {checkpoint} -o {below}", "text.gguf is not a folder"),
        ("convert {checkpoint} -o {folder} --force", "is a directory: a regular file is needed"),
        ("convert {checkpoint} -o {fifo} --force", "is a FIFO: a regular file is needed"),
        ("convert {checkpoint} -o /dev/full --force", "is a device or socket: a regular file is needed"),
        ("convert {checkpoint} --type q4_k", "type 'Q4_K' is not one of F32, F16, BF16, Q8_0, Q4_0,"),
        ("convert {checkpoint} --down up", "invalid choice: 'up'"),
        ("quantize {model} out.gguf", "the following arguments are required: TYPE"),
        ("quantize {model} out.gguf q4_0", "is Q8_0 already, and would lose accuracy twice"),
        ("quantize {model} {model} copy --force", "would replace the one that is read: give another name"),
        ("quantize {model} no/such/folder.gguf copy", "is not a folder: create it first"),
        ("quantize {model} {fifo} copy --force", "is a FIFO: a regular file is needed"),
        ("quantize {text} out.gguf q8_0", "GGUF or PWRI is needed"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_allowed(
    line: str, message: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = places | {"checkpoint": CHECKPOINT}
    mistake(line.format(**given).split(" "), capsys, message.format(**given))


# --- paths and files ---


NO_MODELS = [
    ("", "'' is not a path: name a file"),
    ("{missing}", "missing: cannot be opened: No such file or directory"),
    ("{below}", "cannot be opened: Not a directory"),
    ("{folder}", "is a directory: a regular file is needed"),
    ("{fifo}", "is a FIFO: a regular file is needed"),
    ("/dev/zero", "is a device or socket: a regular file is needed"),
    ("x" * 300, "cannot be opened: File name too long"),
    ("a\0b", "is not a path: name a file"),
    ("{empty}", "empty.gguf"),
    ("{no_model}", "no_model.gguf"),
    ("{text}", "text.gguf"),
    ("{cut_in_header}", "cut_in_header.gguf"),
    ("{cut_in_metadata}", "cut_in_metadata.gguf"),
    ("{cut_in_tensors}", "cut_in_tensors.gguf"),
]


@pytest.mark.parametrize("verb", MODEL)
def test_what_is_no_model(
    verb: str, places: dict[str, Path], parsers_are_kept: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, message in NO_MODELS:
        mistake([verb, *filled([*MODEL[verb], model], places)], capsys, message)


@pytest.mark.parametrize("verb", ["generate", "perplexity", "bench"])
def test_a_model_that_cannot_run(
    verb: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [verb, *filled(MODEL[verb], places)]
    mistake([*arguments, str(places["no_tensor"])], capsys, "tensor blk.3.ffn_up.weight is missing")
    mistake([*arguments, str(places["i16"])], capsys, "blk.3.ffn_up.weight", "I16", "supported")


@pytest.mark.parametrize("verb", ["generate", "perplexity", "bench"])
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    verb: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", read)
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 20)
    mistake([verb, *filled(GOOD[verb], places)], capsys, "not enough memory: the model needs 0.01 GiB")


@pytest.mark.parametrize("verb", ["generate", "perplexity"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", "'' is not a path"), ("{missing}", "missing: No such file or directory"),
        ("{below}", "below: Not a directory"), ("{folder}", "Is a directory"),
        ("{latin1}", "latin1.gguf is not UTF-8 text: byte 0xe4 at 1"), ("a\0b", "is not a path: name a file"),
    ],
)  # fmt: skip
def test_what_is_no_text(
    verb: str, file: str, message: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    mistake([verb, "-f", *filled([file], places)], capsys, message)


@pytest.mark.parametrize("line", ["generate -n 3 -s 1 -f", "perplexity --chunks 1 -f"])
def test_a_byte_order_mark_before_a_text_is_passed_over(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for start in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "text").write_bytes(start + b"Once upon a time")
        assert cli.main([*line.split(), str(tmp_path / "text")]) == 0
        printed.append(re.sub("[0-9]+ tok/s", "", capsys.readouterr().out))
    assert printed[0] == printed[1] and printed[0].strip()


def test_a_text_without_an_end(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotcold.tasks.texts._LONGEST_TEXT", 1 << 16)
    mistake(["generate", "-f", "/dev/zero"], capsys, "/dev/zero is longer than 65536 bytes")


@pytest.mark.parametrize("verb", ["generate", "tokenize"])
def test_standard_input_that_is_no_text(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, places: dict[str, Path]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    mistake([verb, "-p", "-"], capsys, "standard input is not UTF-8 text: b", "at 0")
    mistake([verb, "-p", "a\udcff"], capsys, "lone surrogate, U+DCFF, at character 1")


@pytest.mark.parametrize("verb", ["generate", "tokenize"])
def test_a_note_says_that_standard_input_is_empty(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["-p", "-"]):
        assert cli.main([verb, *options]) == 0
        out, err = capsys.readouterr()
        assert out.strip() and err.startswith("note: standard input has no text: -p gives one\n")
    assert cli.main([verb, "-p", ""]) == 0
    assert "note:" not in capsys.readouterr().err


def test_embed_needs_a_text(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    advice = "has no text: write one text a line, or give texts with -p"
    mistake(["embed"], capsys, f"standard input {advice}")
    mistake(["embed", "-f", str(places["empty"])], capsys, f"{places['empty']} {advice}")


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """A user whom file modes bind; they do not bind root, who becomes another user."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


def test_no_permission(
    places: dict[str, Path], request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(places["model"], "secret.gguf")
    os.chmod("secret.gguf", 0)
    os.mkdir("closed")
    os.chmod("closed", 0o555)
    here = Path.cwd()
    good = {verb: [verb, *filled(arguments, places)] for verb, arguments in GOOD.items()}
    for arguments in good.values():
        assert cli.main([*arguments, "--json"]) == 0  # imports everything, which takes permission too
    os.remove("out.gguf")
    capsys.readouterr()
    request.getfixturevalue("unprivileged")
    for arguments in (["generate", "-m"], ["info"], ["tokenize", "-p", "a", "-m"], ["generate", "-f"]):
        assert cli.main([*arguments, str(here / "secret.gguf")]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Permission denied" in err and err.count("\n") == 1
    assert cli.main(["convert", CHECKPOINT, "-o", str(here / "closed" / "out.gguf")]) == 2
    assert "ermission denied" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    mistake(["generate", "-p", "goat " * 300], capsys, "the prompt has 602 tokens and the context holds 256")
    mistake(["generate", "-c", "4", "-f", str(places["text"])], capsys, "and the context holds 4")
