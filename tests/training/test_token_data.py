"""Texts as token files, and conversations; transformers' own templates and masks are the truth."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import golden_checkpoint

from hotcold.errors import UserError

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers", reason="training needs transformers")

from tokenizers import Tokenizer as Library  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402

from hotcold.training.conversations import encode_conversation  # noqa: E402
from hotcold.training.sparse_checkpoint import open_original  # noqa: E402
from hotcold.training.token_data import Encoder, Mixture, Source, inputs_and_labels, token_file  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
LLAMA = golden_checkpoint("tiny-llama")
HEIDI = (DATA / "heidi.txt").read_text(encoding="utf-8")
TURN = "<|im_start|>{{ message['role'] }}\n"
MARKED = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}" + TURN + "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def chat_tokenizer(template: str | None = PLAIN) -> Any:
    """A byte-level BPE tokenizer of transformers, as those of chat models are."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([HEIDI[:20000]], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def conversations(count: int) -> list[list[dict[str, str]]]:
    random = np.random.default_rng(58)
    ends = ["", "\n", "  ", " émile", "\n\n", " <|im_end|>", " 世界", "{{ x }}"]

    def content() -> str:
        begin = int(random.integers(len(HEIDI) - 200))
        return HEIDI[begin : begin + int(random.integers(0, 120))] + ends[random.integers(len(ends))]

    found = []
    for _ in range(count):
        roles = ["system"] * int(random.integers(2)) + ["user", "assistant"] * int(random.integers(1, 5))
        found.append([{"role": role, "content": content()} for role in roles])
    return found


def test_200_conversations_as_in_transformers() -> None:
    """Tokens, and the mask of a template that marks answers, found without its marks."""
    plain, marked = chat_tokenizer(), chat_tokenizer(MARKED)
    learned_in_all = 0
    for messages in conversations(200):
        truth = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for tokenizer in (plain, marked):
            ids, learned = encode_conversation(tokenizer, messages)
            assert ids == truth["input_ids"] == tokenizer.apply_chat_template(messages, return_dict=False)
            assert learned.tolist() == [bool(each) for each in truth["assistant_masks"]]
        learned_in_all += int(learned.sum())
    assert learned_in_all > 10_000


def test_conversations_that_cannot_be_learned() -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    for template, wrong, given in (
        (PLAIN, "a conversation has no message of the role 'assistant'", messages[:1]),
        (None, "the tokenizer has no chat template", messages),
        ("{{ raise_exception('no') }}", "cannot render a conversation: no", messages),
        ("{{ messages | length }}" + PLAIN, "writes answers in another way", messages),
        (PLAIN.replace("message['content'] }}<", "message['content'] if loop.last else '' }}<", 1),
         "changes earlier messages: mark answers", messages * 2),
    ):  # fmt: skip
        with pytest.raises(UserError, match=wrong):
            encode_conversation(chat_tokenizer(template), given)


@pytest.fixture
def encoder() -> Encoder:
    original = open_original(LLAMA)
    return Encoder(original.tokenizer, LLAMA, int(original.config["vocab_size"]))


def rows_of(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_documents_end_with_eos(suffix: str, encoder: Encoder, tmp_path: Path) -> None:
    texts = ["Heidi ran.", "The goats\ncame back.", "Clara laughed."] * 700  # two batches of Parquet
    path = rows_of(tmp_path / f"rows{suffix}", [{"text": text, "more": 1} for text in texts])
    ids, _ = token_file(path, encoder, tmp_path / "cache")
    tokenizer = encoder.tokenizer
    wanted = [each for text in texts for each in (*tokenizer.encode(text, add_bos=False), tokenizer.eos_id)]
    assert ids.dtype == np.int16 and ids.tolist() == wanted


def test_answers_alone_have_labels(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    folder = tmp_path / "checkpoint"
    tokenizer.save_pretrained(folder)
    given = conversations(9)
    path = rows_of(tmp_path / "chats.jsonl", [{"messages": messages} for messages in given])
    encoder = Encoder(open_original(LLAMA).tokenizer, folder, 40_000)
    ids, _ = token_file(path, encoder, tmp_path / "cache")
    assert ids.dtype == np.int32 and isinstance(ids, np.memmap)
    coded = [encode_conversation(tokenizer, messages) for messages in given]
    batch = inputs_and_labels(np.array(ids, np.int64)[None])
    wanted, learned = np.concatenate([c[0] for c in coded]), np.concatenate([c[1] for c in coded])
    assert (batch["input_ids"][0] == wanted).all()
    assert (batch["labels"][0] == np.where(learned, wanted, -100)).all()


def test_rows_that_cannot_be_read(encoder: Encoder, tmp_path: Path) -> None:
    for rows, message in (
        ([{"text": "a"}, {"content": "b"}], r"row 2 has keys 'content': text or messages is needed"),
        ([["text"]], r"row 1 has \['text'\]: text or"),
        ([{"text": 3}], r"row 1: a string as text or a list as messages is needed"),
        ([{"text": "a"}, {"text": "\ud800"}], r"row 2: the text has a lone surrogate"),
        ([{"messages": []}], r"row 1: a string as text"),
        ([{"messages": ["a"]}], r"row 1: the chat template cannot render a conversation"),
    ):
        path = rows_of(tmp_path / "rows.jsonl", rows)
        with pytest.raises(UserError, match=message):
            token_file(path, encoder, tmp_path / "cache")
    for name, data, message in (
        ("bad.jsonl", b'{"text": "a"}\n{"text"', "line 2 is not a JSON object"),
        ("bad.txt", b"Heidi\xff", "is not UTF-8|byte"),
        ("bad.parquet", b"PAR0", "is not a Parquet file|pip install pyarrow"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            token_file(tmp_path / name, encoder, tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_parquet_file_with_a_damaged_column(encoder: Encoder, tmp_path: Path) -> None:
    path = rows_of(tmp_path / "rows.parquet", [{"text": HEIDI[at : at + 99]} for at in range(5000)])
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)  # the index at the end is whole
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"rows.parquet is not a Parquet file, or damaged: "):
        token_file(path, encoder, tmp_path / "cache")


def test_a_text_is_encoded_once(encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under another name; pieces of a long text are cut at its lines."""
    text = "\ufeff" + "".join(f"line {i}\r\n" for i in range(400))
    for name in ("one.txt", "two.md"):
        (tmp_path / name).write_bytes(text.encode())
    monkeypatch.setattr("hotcold.training.token_data._PIECE", 100)
    ids, name = token_file(tmp_path / "one.txt", encoder, tmp_path / "cache")
    assert encoder.tokenizer.decode(ids.tolist()).split() == text.removeprefix("\ufeff").split()
    monkeypatch.setattr(Encoder, "documents", lambda *args: pytest.fail("it is encoded again"))
    assert token_file(tmp_path / "two.md", encoder, tmp_path / "cache")[1] == name


def test_tokens_of_another_tokenizer_or_form_are_not_taken(encoder: Encoder, tmp_path: Path) -> None:
    """The same bytes are a text, or rows; each file of a tokenizer decides its tokens."""
    names = set()
    for suffix, as_text in ((".jsonl", False), (".txt", True), (".JSONL", False)):
        rows_of(tmp_path / "rows.jsonl", [{"text": "Heidi"}]).rename(path := tmp_path / f"rows{suffix}")
        tokens, name = token_file(path, encoder, tmp_path / "cache")
        names.add(name)
        assert (b"text" in b"".join(map(encoder.tokenizer.piece, tokens.tolist()))) == as_text
    assert len(names) == 2
    for file in ("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "tekken.json"):
        (folder := tmp_path / file.partition(".")[0]).mkdir()
        for content in ("{}", "[]"):
            (folder / file).write_text(content, encoding="utf-8")
            names.add(token_file(tmp_path / "rows.txt", replace(encoder, folder=folder), tmp_path)[1])
    assert len(names) == 2 + 2 * 5


def test_tools_are_in_the_prompt_of_a_conversation(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + PLAIN
    tokenizer, tools = chat_tokenizer(template), [{"type": "function", "function": {"name": "find"}}]
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    truth = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    ids, learned = encode_conversation(tokenizer, messages, tools)
    assert ids == truth and tokenizer.decode(np.array(ids)[learned]) == "Here.<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    encoder = Encoder(open_original(LLAMA).tokenizer, tmp_path / "checkpoint", 40_000)
    for suffix in (".jsonl", ".parquet"):
        path = rows_of(tmp_path / f"rows{suffix}", [{"messages": messages, "tools": tools}])
        (row,) = encoder.documents(path)
        assert np.where(row < 0, ~row, row).tolist() == truth


def test_texts_are_mixed_by_their_shares(encoder: Encoder, tmp_path: Path) -> None:
    sources = [Source(tmp_path / "a.txt", 1.5e308), Source(tmp_path / "b.txt", 5e307)]  # 3 to 1
    for source, text in zip(sources, ("a" * 4000, "b" * 9000), strict=True):
        source.path.write_text(text, encoding="utf-8")
    mixture = Mixture(sources, encoder, 32, 1, tmp_path / "cache")
    rows = np.concatenate([mixture.batch(step, 16) for step in range(50)])
    assert rows.shape == (800, 32) and (rows[:, 0] == encoder.tokenizer.bos_id).all()
    of_b = np.array([b"b" in encoder.tokenizer.piece(int(row[5])) for row in rows])
    assert 0.20 < of_b.mean() < 0.30
    assert (mixture.batch(7, 16) == mixture.batch(7, 16)).all()
    assert (mixture.batch(7, 16) != mixture.batch(8, 16)).any()
    alone = Mixture([replace(sources[0], share=None)], encoder, 32, 1, tmp_path / "cache")
    assert alone.judging.shape[1] == 32


def test_held_out_windows_are_not_trained_on(encoder: Encoder, tmp_path: Path) -> None:
    source = Source(tmp_path / "heidi.txt")
    source.path.write_text(HEIDI[:30000], encoding="utf-8")
    mixture = Mixture([source], encoder, 32, 0, tmp_path / "cache")
    ids, _ = token_file(source.path, encoder, tmp_path / "cache")
    windows = {bytes(row) for row in (*mixture.choosing, *mixture.judging)}
    assert len(windows) == len(mixture.choosing) + len(mixture.judging) > 20
    assert abs(len(mixture.choosing) - len(mixture.judging)) <= 1
    last = max(begin for begin in range(len(ids)) if mixture.tokens >= begin + 31)
    assert last + 31 == mixture.tokens == len(ids) - 31 * len(windows)
    (tmp_path / "other.txt").write_text(HEIDI[-4000:], encoding="utf-8")
    other = Mixture([source], encoder, 32, 0, tmp_path / "cache", tmp_path / "other.txt")
    assert not {bytes(row) for row in other.judging} & windows
    assert {bytes(row) for row in other.choosing} == windows
