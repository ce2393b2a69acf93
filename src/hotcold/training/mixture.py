"""Draws training windows from several texts in given shares (TurboSparse's data mixture)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]

_HELD_OUT = 0.05  #: share of a text's end that is not trained on
_MOST_WINDOWS = 64  #: windows that judge, of all texts together
_PIECE = 1 << 20  #: characters that are encoded at a time


@dataclass(frozen=True)
class NamedText:
    """A text to train on, and its share; shares are relative, None is as the texts' lengths."""

    name: str
    text: str
    share: float | None = None


class Mixture:
    """Texts as tokens. Windows of ``context`` tokens begin with BOS where the tokenizer adds one. With
    ``special`` names of control tokens, as a chat template writes them, become these tokens.

    Which windows belong to a step depends on the seed and the step alone, so that a run can go on anywhere.
    """

    def __init__(
        self,
        texts: Sequence[NamedText],
        tokenizer: Tokenizer,
        context: int,
        seed: int,
        *,
        special: bool = True,
    ) -> None:
        self.context, self._seed = context, seed
        self._bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        self._step = context - len(self._bos)
        self._train: list[Ids] = []
        parts: list[Ids] = []
        for text in texts:
            train, judge = self._cut(text.name, _encode(tokenizer, text.text, special))
            self._train.append(train)
            parts.append(judge)
        given = [text.share for text in texts if text.share is not None]
        if given and len(given) < len(texts):
            raise UserError("some texts have a share and others have none: give all a share, or none")
        weights = given or [len(ids) for ids in self._train]
        self.shares = np.array(weights, np.float64) / sum(weights)
        self.tokens = sum(map(len, self._train))  #: to train on
        self.held_out = self._held_out(parts)  #: [windows, context] int64

    def _cut(self, name: str, ids: Ids) -> tuple[Ids, Ids]:
        step = self._step
        windows = max(1, int(len(ids) * _HELD_OUT) // step)
        if len(ids) < 2 * step:
            least = f"{2 * step} are needed, for a window of {self.context} to train on and one to judge by"
            raise UserError(f"{name} has {len(ids)} tokens: {least}")
        end = len(ids) - windows * step
        return ids[:end], ids[end:]

    def _held_out(self, parts: Sequence[Ids]) -> npt.NDArray[np.int64]:
        rows = []
        for share, ids in zip(self.shares, parts, strict=True):
            wanted = max(1, round(_MOST_WINDOWS * share))
            rows += [self._window(ids, begin) for begin in range(0, len(ids), self._step)][:wanted]
        return np.array(rows)

    def _window(self, ids: Ids, begin: int) -> npt.NDArray[np.int64]:
        return np.array([*self._bos, *ids[begin : begin + self._step]], np.int64)

    def batch(self, step: int, size: int) -> npt.NDArray[np.int64]:
        """``[size, context]`` token ids of one step."""
        random = np.random.default_rng([self._seed, step])
        rows = []
        for number in random.choice(len(self._train), size, p=self.shares):
            ids = self._train[number]
            rows.append(self._window(ids, int(random.integers(len(ids) - self._step + 1))))
        return np.array(rows)


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> Ids:
    """In pieces that end with a line where they can, so that memory holds few ids as Python's integers."""
    pieces, begin = [np.empty(0, np.int32)], 0
    while begin < len(text):
        end = text.rfind("\n", begin, begin + _PIECE) + 1 if begin + _PIECE < len(text) else len(text)
        end = end or begin + _PIECE
        ids = tokenizer.encode(text[begin:end], add_bos=False, parse_special=special)
        pieces.append(np.array(ids, np.int32))
        begin = end
    return np.concatenate(pieces)
