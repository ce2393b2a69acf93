"""Constraint for an answer after a thought: limits the thought's length, and applies the grammar to the
answer."""

import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotcold.engine.request import Constraint, Job
from hotcold.engine.sampler import Allowed, mask_of
from hotcold.engine.thought import phases_of, unfinished
from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import StreamDecoder, Tokenizer

_SPACES = 8  # whitespace characters allowed before an answer, outside the grammar
_LATE = 3  # tokens past the budget that may complete a character
_TAIL = 64  # prompt tokens that a decoder needs (see TextStream)
_FORBIDDEN = -math.inf
_THOUGHTS = "analysis"  # Harmony's channel of thoughts
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)\Z")

_Mask = npt.NDArray[np.uint64]


class Spelling:
    """The tokens of one vocabulary by their text. Only control tokens in ``shown`` have text: their names."""

    def __init__(self, tokenizer: Tokenizer, shown: Sequence[int]) -> None:
        self.stops, self.shown = tokenizer.stop_ids, shown
        self._tokenizer = tokenizer
        self._silent = {*tokenizer.control_names, *tokenizer.stop_ids}.difference(shown)
        self._beginning: dict[str, _Mask] = {}
        self._completing: dict[tuple[str, str], list[tuple[int, str]]] = {}

    @cached_property
    def _pieces(self) -> list[bytes]:
        every = range(self._tokenizer.vocab_size)
        return [b"" if id in self._silent else self._tokenizer.piece(id) for id in every]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: id for id, piece in reversed([*enumerate(self._pieces)]) if piece}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def decoder(self, prompt: Sequence[int]) -> StreamDecoder:
        """Returns a decoder for the text after a prompt."""
        decoder = self._tokenizer.stream_decoder(self.shown)
        for id in prompt[-_TAIL:]:
            decoder.push(id)
        return decoder

    @cached_property
    def spaces(self) -> _Mask:
        """Mask of whitespace tokens."""
        return self.mask(id for id, piece in enumerate(self._pieces) if self._is_space(piece))

    def whitespace(self, id: int) -> int:
        """Returns the number of characters of a whitespace token; 0 for any other token."""
        return len(self._pieces[id]) if self._is_space(self._pieces[id]) else 0

    def mask(self, ids: Iterable[int]) -> _Mask:
        """Returns the mask of these tokens."""
        return mask_of(ids, len(self._pieces))

    def spelled(self, text: str) -> list[int]:
        """Splits a text into tokens, greedily: the longest token at each position."""
        data, ids, at = text.encode(), list[int](), 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                raise UserError(f"the model's vocabulary cannot spell {text!r:.40}")
            ids.append(self._ids[data[at:end]])
            at = end
        return ids

    def beginning(self, text: str) -> _Mask:
        """Returns the mask of tokens with which a text may begin."""
        if text not in self._beginning:
            data = text.encode()
            ids = (
                id
                for id, piece in enumerate(self._pieces)
                if piece and (data.startswith(piece) or piece.startswith(data))
            )
            self._beginning[text] = self.mask(ids)
        return self._beginning[text]

    def completing(self, begun: str, mark: str) -> list[tuple[int, str]]:
        """Returns the tokens that complete a partly written mark and add more than whitespace after it.
        ``begun``: the part of the mark that the text has. Each token comes with the text after the mark."""
        key = begun, mark
        if key not in self._completing:
            before, data = begun.encode(), mark.encode()
            rests = (
                (id, (before + token_piece).partition(data)[2].decode(errors="replace").lstrip())
                for id, token_piece in enumerate(self._pieces)
                if token_piece and data in before + token_piece
            )
            self._completing[key] = [token_piece for token_piece in rests if token_piece[1]]
        return self._completing[key]

    @staticmethod
    def _is_space(piece: bytes) -> bool:
        return 0 < len(piece) <= _SPACES and piece.isspace()


class ThoughtConstraint:
    """Lets the model think, then applies the grammar, if any, to its answer. At the end of the thought's
    budget, only the next token of the end mark is allowed. Like any :class:`Constraint`, it depends only on
    the tokens of the call."""

    def __init__(self, spelling: Spelling, job: Job, form: Constraint | None) -> None:
        assert job.thought is not None
        self._spelling, self._thought, self._prompt, self._form = spelling, job.thought, job.prompt, form
        self._restart()

    def __call__(self, output: Sequence[int]) -> Allowed:
        self._follow(output)
        if self._ends_now:
            return Allowed(self._spelling.mask(self._end_ids()[:1]))
        if self._thought.channels:
            return self._in_channels(output)
        if self._form is None:
            return Allowed()
        if self._phases.phase == "thought":
            return Allowed(bias=dict.fromkeys(self._not_in_thought(self._form), _FORBIDDEN) or None)
        if not self._held:
            return Allowed(self._may_begin(self._form, output))
        allowed = self._form(self._answer(output))
        if self._spaces_before(output) and allowed.mask is not None:
            return allowed._replace(mask=allowed.mask | self._spelling.spaces)
        return allowed

    def prepare(self, output: Sequence[int]) -> None:
        """Lets the grammar compute its next mask in a thread."""
        self._follow(output)
        prepare = getattr(self._form, "prepare", None)
        if prepare is not None and (not output or self._held):
            prepare(self._answer(output))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Returns the end mark at the end of the budget, else the tokens that the grammar forces."""
        self._follow(output)
        if self._ends_now:
            return self._end_ids()
        forced = getattr(self._form, "forced", None)
        tokens: Sequence[int] = forced(self._answer(output)) if forced is not None and self._held else ()
        return tokens

    def possible(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Returns how many of ``tokens`` may follow; in a thought, all of them."""
        self._follow(output)
        possible = getattr(self._form, "possible", None)
        if possible is None or not self._held or self._spaces_before(output):
            return len(tokens)
        count: int = possible(self._answer(output), tokens)
        return count

    # --- position in the text -------------------------------------------------------------------------

    def _restart(self) -> None:
        self._phases = phases_of(self._thought)
        self._decoder = self._spelling.decoder(self._prompt)
        self._n = 0  # output tokens followed so far
        self._spent = 0  # tokens in thoughts
        self._start = 0  # index of the answer's first token in the output
        self._before: list[int] = []  # tokens of the answer that earlier output tokens contain
        self._held = self._thought.channels  # whether the grammar applies to the next token
        self._spaces = 0  # whitespace characters outside the grammar
        if self._form is not None and not self._thought.may_begin and not self._thought.opened:
            self._held, self._spaces = True, _SPACES

    def _follow(self, output: Sequence[int]) -> None:
        if len(output) < self._n:
            self._restart()
        for id in output[self._n :]:
            self._n += 1
            self._push(id)

    def _push(self, id: int) -> None:
        phases, text = self._phases, self._decoder.push(id)
        before = phases.phase
        self._spent += before == "thought"
        parts = [*phases.push(text)]
        if self._thought.channels:
            return
        if before == "begin" and phases.phase == "thought" and self._held:
            self._begin_thought_in_form()
        if self._form is not None and not self._held and phases.phase == "answer":
            if before != "begin":
                self._begin_answer("".join(part for answers, part in parts if answers))
            self._held = phases.phase == "answer"
        if before != "thought" and self._n == self._start + 1 and not self._before:
            self._skip_space(id)
        if phases.phase == "thought" and not self._held:
            self._start = self._n

    def _begin_thought_in_form(self) -> None:
        """Handles a thought that begins where the grammar already applies. A grammar that accepts an empty
        answer is one of free text: it applies after the thought. Any other grammar contains the marks."""
        assert self._form is not None
        if self._forbidden_ends(self._form):
            self._phases.phase = "answer"
        else:
            self._held = False

    def _begin_answer(self, rest: str) -> None:
        """Begins the answer with the text, if any, that the last token has after the thought."""
        self._start, self._spaces = self._n, 0
        if not self._phases.call:
            self._before = self._spelling.spelled(rest.lstrip())
            return
        called = self._spelling.spelled(f"{self._thought.call_head}{self._phases.call}{rest}")
        if self._accepted(called):
            self._before = called
        else:
            self._phases.resume()

    def _skip_space(self, id: int) -> None:
        """Excludes a whitespace token before the answer from the grammar."""
        size = self._spelling.whitespace(id)
        if size and self._spaces + size <= _SPACES:
            self._start, self._spaces = self._n, self._spaces + size

    def _spaces_before(self, output: Sequence[int]) -> bool:
        """Returns whether whitespace may come before the answer."""
        return len(output) == self._start and not self._before and self._spaces < _SPACES

    def _answer(self, output: Sequence[int]) -> list[int]:
        return [*self._before, *output[self._start :]]

    # --- allowed tokens -------------------------------------------------------------------------------

    @property
    def _ends_now(self) -> bool:
        """True if the thought's budget is used up."""
        budget = self._thought.budget
        if budget is None or self._phases.phase != "thought" or self._spent < budget:
            return False
        return self._decoder.whole or self._spent >= budget + _LATE

    def _end_ids(self) -> list[int]:
        end = self._phases.end
        return self._spelling.spelled(end.removeprefix(unfinished(self._phases.tail, end)))

    def _not_in_thought(self, form: Constraint) -> list[int]:
        """Returns tokens that must not follow in a thought: end tokens, and tokens with the end mark and a
        beginning of the answer that the grammar rejects."""
        ends = self._forbidden_ends(form)
        end = self._phases.end
        completing = self._spelling.completing(unfinished(self._phases.tail, end), end)
        spelled = self._spelling.spelled
        return ends + [id for id, rest in completing if not self._accepted(spelled(rest))]

    def _forbidden_ends(self, form: Constraint) -> list[int]:
        """Returns the end tokens that the grammar forbids at the beginning, as it does if no answer may be
        empty."""
        mask = form(()).mask
        return [] if mask is None else [id for id in self._spelling.stops if not _has(mask, id)]

    def _accepted(self, tokens: Sequence[int]) -> bool:
        """Returns whether the grammar accepts an answer that begins with these tokens."""
        possible = getattr(self._form, "possible", None)
        return possible is None or possible((), tokens) == len(tokens)

    def _may_begin(self, form: Constraint, output: Sequence[int]) -> _Mask | None:
        """Returns the tokens with which a thought or the answer may begin."""
        begun = self._phases.tail.lstrip()
        mask = self._spelling.beginning(self._thought.start.removeprefix(begun))
        if self._spaces_before(output):
            mask = mask | self._spelling.spaces
        try:
            allowed = form(self._answer(output)).mask
        except UserError:
            if not begun:
                raise
            return mask  # the grammar rejects the text so far: it can only become the mark
        return None if allowed is None else allowed | mask

    def _in_channels(self, output: Sequence[int]) -> Allowed:
        """Returns the tokens that the grammar of channels allows; no thought begins after the budget."""
        allowed = self._form(output) if self._form is not None else Allowed()
        budget = self._thought.budget
        if budget is None or self._spent < budget or self._phases.phase != "header":
            return allowed
        channel = _CHANNEL.search(self._phases.tail)
        if channel is None or not _THOUGHTS.startswith(channel[1]) or channel[1] == _THOUGHTS:
            return allowed
        thoughts = self._spelling.beginning(_THOUGHTS.removeprefix(channel[1]))
        left = ~thoughts if allowed.mask is None else allowed.mask & ~thoughts
        return allowed._replace(mask=left) if left.any() else allowed


def _has(mask: _Mask, id: int) -> bool:
    return bool(int(mask[id // 64]) >> (id % 64) & 1)
