"""Training texts as token files on disk, and the windows of each step (TurboSparse's data mixture)."""

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.files import replacing
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.training.conversations import encode_conversation
from hotcold.training.libraries import library_errors, transformers
from hotcold.training.processes import in_first_process
from hotcold.training.sparse_model import IGNORED
from hotcold.values import not_utf8, shown

Ids = npt.NDArray[Any]

_HELD_OUT = 0.05  #: share of each text, at its end, that is held out
_MOST_WINDOWS = 128  #: held-out windows of all texts: half choose thresholds, half measure
_PIECE = 1 << 20  #: characters that are encoded at a time

#: Files of a checkpoint that decide the tokens of a text.
TOKENIZER_FILES = (
    "generation_config.json", "*token*", "tekken.json", "vocab.json", "merges.txt", "chat_template*",
)  # fmt: skip
_ROWS = (".jsonl", ".json")


@dataclass(frozen=True)
class Source:
    """A file to train on, and its share. Shares are relative; None is in proportion to the files' lengths.

    The suffix decides the format: ``.jsonl`` and ``.parquet`` have rows with ``text`` or ``messages``, each a
    document; other files are one text in UTF-8. Rows with ``messages`` may have ``tools``."""

    path: Path
    share: float | None = None


@dataclass(frozen=True)
class Encoder:
    """The tokenizer of a checkpoint. With ``special``, names of control tokens become these tokens."""

    tokenizer: Tokenizer
    folder: Path  #: of the checkpoint, whose chat template conversations use
    vocabulary: int
    special: bool = True

    @cached_property
    def _chat(self) -> Any:
        with library_errors(f"{self.folder}: transformers cannot load the tokenizer"):
            return transformers().AutoTokenizer.from_pretrained(self.folder, local_files_only=True)

    @cached_property
    def identity(self) -> str:
        """A hash of the tokenizer's files."""
        patterns = (*TOKENIZER_FILES, "config.json")
        names = {path for pattern in patterns for path in self.folder.glob(pattern)}
        hashes = {path.name: hash_of(path) for path in sorted(names) if path.is_file()}
        return hashlib.sha256(json.dumps([hashes, self.special]).encode()).hexdigest()

    @property
    def dtype(self) -> Any:
        """The type of a token file. Tokens without a loss are stored as ``~id``, which is below 0."""
        return np.int16 if self.vocabulary <= 1 << 15 else np.int32

    def documents(self, path: Path) -> Iterator[Ids]:
        """The pieces of a file as tokens, a row at a time. UserError: the file cannot be read as such."""
        try:
            if (suffix := path.suffix.lower()) in _ROWS:
                yield from (self._row(path, *row) for row in _json_rows(path))
            elif suffix == ".parquet":
                yield from (self._row(path, *row) for row in _parquet_rows(path))
            else:
                with path.open(encoding="utf-8-sig", newline="") as file:
                    while piece := file.read(_PIECE):  # up to a line end, so that no word is cut
                        yield self._encode(piece + file.readline(_PIECE))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} {not_utf8(error)}") from None

    def _encode(self, text: str) -> Ids:
        ids = self.tokenizer.encode(text, add_bos=False, parse_special=self.special)
        return np.array(ids, self.dtype)

    def _row(self, path: Path, number: int, row: Any) -> Ids:
        if not isinstance(row, dict) or not ({"text", "messages"} & row.keys()):
            got = f"keys {shown(', '.join(map(str, row)))}" if isinstance(row, dict) else shown(row)
            raise UserError(f"{path}, row {number} has {got}: text or messages is needed")
        try:
            if isinstance(text := row.get("text"), str):
                ids, eos = self._encode(text), self.tokenizer.eos_id
                ended = eos is None or (len(ids) and ids[-1] == eos)
                return ids if ended else np.append(ids, self.dtype(eos))
            if not isinstance(messages := row.get("messages"), list) or not messages:
                raise UserError("a string as text or a list as messages is needed")
            values, learned = encode_conversation(self._chat, messages, row.get("tools"))
        except UserError as error:
            raise UserError(f"{path}, row {number}: {error}") from None
        ids = np.array(values, self.dtype)
        return np.where(learned, ids, ~ids)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number} is not a JSON object: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from None
    with library_errors(f"{path} is not a Parquet file, or damaged"):
        file = parquet.ParquetFile(path)
        names = [name for name in ("text", "messages", "tools") if name in file.schema_arrow.names]
        batches = file.iter_batches(1024, columns=names or None)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def hash_of(path: Path) -> str:
    """The hash of a file's content. UserError: it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def token_file(path: Path, encoder: Encoder, folder: Path) -> tuple[Ids, str]:
    """The tokens of a text file, mapped from a file in ``folder``, and its name; encodes new texts."""
    suffix = path.suffix.lower()
    form = suffix if suffix in (*_ROWS, ".parquet") else ""  # the same bytes may be rows or a text
    name = hashlib.sha256((hash_of(path) + encoder.identity + form).encode()).hexdigest()[:16]
    target = folder / f"{name}.tokens"

    def encode() -> None:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                for ids in encoder.documents(path):
                    file.write(np.ascontiguousarray(ids, encoder.dtype).data)

    in_first_process(encode)
    if not target.stat().st_size:
        return np.empty(0, encoder.dtype), name
    return np.memmap(target, encoder.dtype, mode="r"), name


@dataclass
class Mixture:
    """Windows of ``context`` tokens from several files; BOS begins each if the tokenizer adds one.

    The windows of a step depend only on the seed and the step, so that a run can continue anywhere.
    ``held_out`` is a file for measuring; without it, the ends of the files are held out."""

    sources: Sequence[Source]
    encoder: Encoder
    context: int
    seed: int
    folder: Path  #: of token files
    held_out: Path | None = None
    identity: list[str] = field(default_factory=list)  #: names of the token files to train on

    def __post_init__(self) -> None:
        tokenizer = self.encoder.tokenizer
        self._bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        self._step = self.context - len(self._bos)
        given = [source.share for source in self.sources if source.share is not None]
        if given and len(given) < len(self.sources):
            raise UserError("some texts have a share and others do not: give each a share, or none")
        for source in self.sources:
            if source.share is not None and not 0 < source.share < math.inf:
                raise UserError(f"{source.path}: the share {source.share} is not a number above 0")
        self._train, ends = [], []
        for source in self.sources:
            ids, name = self._tokens(source.path, 3)
            self.identity.append(name)
            end = len(ids) - self._step * max(2, int(len(ids) * _HELD_OUT) // self._step)
            self._train.append(ids[:end])
            ends.append(ids[end:])
        weights = np.array(given or [len(ids) for ids in self._train], np.float64)
        self.shares = weights / weights.max()  # a sum of large shares could overflow
        self.shares /= self.shares.sum()
        self.tokens = sum(map(len, self._train))  #: to train on
        rows = []
        for share, ids in zip(self.shares, ends, strict=True):
            rows += self._windows(ids)[: max(2, round(_MOST_WINDOWS * share))]
        if self.held_out is None:
            self.choosing, self.judging = np.array(rows[::2]), np.array(rows[1::2])
        else:
            judging = self._windows(self._tokens(self.held_out, 1)[0])
            self.choosing = np.array(rows)
            self.judging = np.array(judging[:: -(-len(judging) // _MOST_WINDOWS)])

    def _tokens(self, path: Path, windows: int) -> tuple[Ids, str]:
        ids, name = token_file(path, self.encoder, self.folder)
        if len(ids) < windows * self._step:
            needed = f"{windows * self._step} are needed, {windows} windows of {self.context}"
            raise UserError(f"{path} has {len(ids)} tokens: {needed}")
        return ids, name

    def _windows(self, ids: Ids) -> list[npt.NDArray[np.int64]]:
        step = self._step
        return [self._window(ids, begin) for begin in range(0, len(ids) - step + 1, step)]

    def _window(self, ids: Ids, begin: int) -> npt.NDArray[np.int64]:
        return np.array([*self._bos, *ids[begin : begin + self._step]], np.int64)

    def batch(self, step: int, size: int) -> npt.NDArray[np.int64]:
        """``[size, context]`` signed token ids of one step; see :func:`inputs_and_labels`."""
        random = np.random.default_rng([self.seed, step])
        rows = []
        for number in random.choice(len(self._train), size, p=self.shares):
            ids = self._train[number]
            rows.append(self._window(ids, int(random.integers(len(ids) - self._step + 1))))
        return np.array(rows)


def inputs_and_labels(rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """Token ids of windows, and their labels: tokens without a loss are stored as ``~id``."""
    return {"input_ids": np.where(rows < 0, ~rows, rows), "labels": np.where(rows < 0, IGNORED, rows)}
