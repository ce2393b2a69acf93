"""Names of models on the hub: what they mean, what is refused, and which file of a repository is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.hub.names import HubError, HubName, choose, is_hub_name, is_safe, parse


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:own/Name-7B", HubName("own/Name-7B")),
        ("own/Name-7B", HubName("own/Name-7B")),
        ("own/name:Q4_K_M", HubName("own/name", quant="Q4_K_M")),
        ("hf:own/name:q8_0@v1.2", HubName("own/name", quant="q8_0", revision="v1.2")),
        ("hf:own/name/a b.gguf", HubName("own/name", "a b.gguf")),
        ("own/name:sub/m-00001-of-00003.gguf", HubName("own/name", "sub/m-00001-of-00003.gguf")),
        ("hf:own/na.me/x.gguf@refs/pr/3", HubName("own/na.me", "x.gguf", revision="refs/pr/3")),
        (f"own/name@{'c' * 40}", HubName("own/name", revision="c" * 40)),
        ("hf.co/own/name", HubName("own/name")),
        ("hf.co/own/Name-7B:Q4_K_M", HubName("own/Name-7B", quant="Q4_K_M")),
        ("huggingface.co/own/name:q8_0@v1.2", HubName("own/name", quant="q8_0", revision="v1.2")),
        ("HF.co/own/name/a.gguf", HubName("own/name", "a.gguf")),
        ("https://huggingface.co/own/name", HubName("own/name")),
        ("https://huggingface.co/own/name/", HubName("own/name")),
        ("http://www.huggingface.co/own/name/tree/main", HubName("own/name")),
        ("https://hf.co/own/name/tree/v2", HubName("own/name", revision="v2")),
        ("https://huggingface.co/own/name/blob/main/s/a.gguf", HubName("own/name", "s/a.gguf")),
        (
            f"https://huggingface.co/own/name/resolve/{'c' * 40}/a.gguf?download=true",
            HubName("own/name", "a.gguf", revision="c" * 40),
        ),
    ],
)
def test_the_forms(text: str, name: HubName) -> None:
    assert parse(text) == name
    assert parse(str(name)) == name
    if text.startswith("hf:") or ".co/" in text:
        assert is_hub_name(text) and is_hub_name(Path(text)) and parse(Path(text)) == name


@pytest.mark.parametrize(
    "model",
    [
        "own/name", "./hf:own/name", "model.gguf", Path("hf"), None, 3, "./hf.co/own/name", "hf.com/own/name",
        "https://example.org/own/name", "chf.co/own/name",
    ],
)  # fmt: skip
def test_what_is_no_name_but_a_path(model: object) -> None:
    assert not is_hub_name(model)


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:name", "hf:/own/name", "hf:own/", "hf:../name", "hf:own/..", "own/na--me", "own/n..e",
        ".own/name", "own/name.", "hf:own/name/", "own/name:", "own/name@", "own/name:x@", "hf:own/name/Q4_0",
        "own/name:Q4 0", "own/name/../x.gguf", "own/name:../../x.gguf", "own/name:a/../x.gguf",
        "own/name:/etc/x.gguf", "own/name:a//x.gguf", "own/name:a\\..\\x.gguf", "own/name:C:x.gguf",
        "own/name:x\n.gguf", "own/name:x\0.gguf", "own/name:./x.gguf", "own/name: x.gguf/y.gguf",
        "hf.co/", "hf.co/own", "https://huggingface.co/own/name/tree", "https://hf.co/own/name/blob/main/../x.gguf",
        "https://hf.co/own/name/discussions/3", "hf.co/../name", "https://hf.co/own/name/resolve/../a.gguf",
        "own/name:x.gguf@../main", "own/name@a/../b", "own/name@/main", "own/name@a b", "own/name@.hidden",
        "own/name@x\n", "own/name\n", "ówn/name", "own/" + "n" * 97, "own/name:" + "x" * 2000 + ".gguf",
        "own/name:" + "x" * 300 + ".gguf", "-o/name",
    ],
)  # fmt: skip
def test_names_that_are_refused(text: str) -> None:
    with pytest.raises(HubError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.isprintable() and message.isascii() and len(message) < 400 and "needed" in message


@pytest.mark.parametrize("path", ["a.gguf", "a/b.gguf", "...gguf", "a b/c-d_e.gguf", "ü.gguf"])
def test_safe_paths(path: str) -> None:
    assert is_safe(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/./b",
        "a\\b",
        "a:b",
        "a\0",
        "a\nb",
        " a",
        "a /b",
        "*",
    ],
)
def test_unsafe_paths(path: str) -> None:
    assert not is_safe(path)


QUANTS = [
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-Q4_K.gguf",
    "m.q8_0.gguf",
    "UD-Q4_K_XL/m.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("asked", "files", "chosen"),
    [
        ("o/n", ["readme.md", "m.gguf", "mmproj-m.gguf", "imatrix.gguf"], ["m.gguf"]),
        ("o/n:Q4_K_M", QUANTS, ["m-Q4_K_M.gguf"]),
        ("o/n:q4_k", QUANTS, ["m-Q4_K.gguf"]),
        ("o/n:Q8_0", QUANTS, ["m.q8_0.gguf"]),
        ("o/n:UD-Q4_K_XL", QUANTS, ["UD-Q4_K_XL/m.gguf"]),
        ("o/n:mmproj-F16.gguf", QUANTS, ["mmproj-F16.gguf"]),
        (
            "o/n",
            ["x/m-00002-of-00002.gguf", "x/m-00001-of-00002.gguf"],
            ["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf"],
        ),
        (
            "o/n:m-00002-of-00002.gguf",
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"],
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
        ),
        (
            "o/n",
            ["m.gguf", "m.predictor.gguf", "m.profile.gguf", "n.predictor.gguf"],
            ["m.gguf", "m.predictor.gguf", "m.profile.gguf"],
        ),
        ("o/n", ["m.gguf", "../evil.gguf", "/evil.gguf", "a\\evil.gguf"], ["m.gguf"]),
    ],
)
def test_the_files_that_are_meant(asked: str, files: list[str], chosen: list[str]) -> None:
    assert choose(parse(asked), files) == chosen


@pytest.mark.parametrize(
    ("asked", "files", "message"),
    [
        (
            "o/n",
            QUANTS,
            "has 5 models: choose one, as in o/n:.*; it has UD-Q4_K_XL, Q4_K, Q4_K_M, Q4_K_S, q8_0",
        ),
        ("o/n:Q5_0", QUANTS, "no file of quantisation Q5_0: it has UD-Q4_K_XL, Q4_K"),
        ("o/n:Q4", QUANTS, "no file of quantisation Q4: it has"),
        ("o/n:x.gguf", QUANTS, "no file 'x.gguf': it has"),
        ("o/n", ["a-F16.gguf", "b-F16.gguf"], "it has a-F16.gguf, b-F16.gguf"),
        ("o/n", ["model.safetensors"], "has no GGUF file: it has no .gguf files"),
        ("o/n", ["../m.gguf"], "has no GGUF file"),
        ("o/n", ["m-00001-of-00003.gguf"], "no 'm-00002-of-00003.gguf' and 1 more, of the 3 parts"),
        ("o/n:m-00001-of-99999.gguf", ["m-00001-of-99999.gguf"], "1 to 512 parts are allowed"),
        ("o/n", [f"m-{i}.gguf" for i in range(99)], "m-3.gguf and 75 more"),
    ],
)
def test_what_is_not_there_or_not_clear(asked: str, files: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        choose(parse(asked), files)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
