"""Thinks, then answers in form: a grammar that begins behind a thought, and a thought of bounded length."""

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

_SPACES = 8  # characters of whitespace before an answer that no grammar sees
_LATE = 3  # tokens that may complete a character where the budget ends
_TAIL = 64  # tokens of a prompt that a decoder must see: as of TextStream
_FORBIDDEN = -math.inf
_THOUGHTS = "analysis"  # Harmony's channel of thoughts
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)\Z")

_Mask = npt.NDArray[np.uint64]


class Spelling:
    """The tokens of one vocabulary by their text. Control tokens that are ``shown`` have their names as
    text, others have none."""

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
        """A decoder of what follows a prompt."""
        decoder = self._tokenizer.stream_decoder(self.shown)
        for id in prompt[-_TAIL:]:
            decoder.push(id)
        return decoder

    @cached_property
    def spaces(self) -> _Mask:
        """Tokens of whitespace."""
        return self.mask(id for id, piece in enumerate(self._pieces) if self._is_space(piece))

    def whitespace(self, id: int) -> int:
        """How many characters of whitespace a token is; 0 if it is anything else."""
        return len(self._pieces[id]) if self._is_space(self._pieces[id]) else 0

    def mask(self, ids: Iterable[int]) -> _Mask:
        """The mask of these tokens."""
        return mask_of(ids, len(self._pieces))

    def spelled(self, text: str) -> list[int]:
        """Tokens of a text, the longest one at each place."""
        data, found, at = text.encode(), list[int](), 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                raise UserError(f"the model's vocabulary cannot spell {text!r:.40}")
            found.append(self._ids[data[at:end]])
            at = end
        return found

    def beginning(self, text: str) -> _Mask:
        """Tokens with which a text may begin."""
        if text not in self._beginning:
            data = text.encode()
            found = (
                id
                for id, each in enumerate(self._pieces)
                if each and (data.startswith(each) or each.startswith(data))
            )
            self._beginning[text] = self.mask(found)
        return self._beginning[text]

    def completing(self, begun: str, mark: str) -> list[tuple[int, str]]:
        """Tokens that complete a mark of which a text has ``begun`` some, and bring more than whitespace
        behind it; with that text."""
        key = begun, mark
        if key not in self._completing:
            before, data = begun.encode(), mark.encode()
            rests = (
                (id, (before + each).partition(data)[2].decode(errors="replace").lstrip())
                for id, each in enumerate(self._pieces)
                if each and data in before + each
            )
            self._completing[key] = [each for each in rests if each[1]]
        return self._completing[key]

    @staticmethod
    def _is_space(piece: bytes) -> bool:
        return 0 < len(piece) <= _SPACES and piece.isspace()


class ThoughtConstraint:
    """Lets the model think, and then holds its answer to the constraint of a grammar, if there is one.

    At the end of the thought's budget the only token allowed is the next one of the mark that ends it. As
    any :class:`Constraint` it depends on the tokens alone that it is asked about."""

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
        """Has the grammar make its next mask in a thread."""
        self._follow(output)
        prepare = getattr(self._form, "prepare", None)
        if prepare is not None and (not output or self._held):
            prepare(self._answer(output))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """The mark where the budget ends; else what the grammar forces."""
        self._follow(output)
        if self._ends_now:
            return self._end_ids()
        forced = getattr(self._form, "forced", None)
        found: Sequence[int] = forced(self._answer(output)) if forced is not None and self._held else ()
        return found

    def possible(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow; all of them in a thought."""
        self._follow(output)
        possible = getattr(self._form, "possible", None)
        if possible is None or not self._held or self._spaces_before(output):
            return len(tokens)
        found: int = possible(self._answer(output), tokens)
        return found

    # --- where the text is ----------------------------------------------------------------------------

    def _restart(self) -> None:
        self._phases = phases_of(self._thought)
        self._decoder = self._spelling.decoder(self._prompt)
        self._n = 0  # tokens of the output that were followed
        self._spent = 0  # tokens of thoughts
        self._start = 0  # the output's first token of the answer
        self._before: list[int] = []  # the answer's tokens before that one
        self._held = self._thought.channels  # whether a grammar holds what comes next
        self._spaces = 0  # characters of whitespace that no grammar saw
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
        """A model has begun a thought that its form need not leave room for. A form that the answer need not
        fill is one of free text, and begins behind the thought; any other has the marks in it."""
        assert self._form is not None
        if self._forbidden_ends(self._form):
            self._phases.phase = "answer"
        else:
            self._held = False

    def _begin_answer(self, rest: str) -> None:
        """The answer begins with the text that the last token has behind the thought, if any."""
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
        """Leaves whitespace before the answer out of its form."""
        size = self._spelling.whitespace(id)
        if size and self._spaces + size <= _SPACES:
            self._start, self._spaces = self._n, self._spaces + size

    def _spaces_before(self, output: Sequence[int]) -> bool:
        """Whether whitespace may come before the answer begins."""
        return len(output) == self._start and not self._before and self._spaces < _SPACES

    def _answer(self, output: Sequence[int]) -> list[int]:
        return [*self._before, *output[self._start :]]

    # --- what may come --------------------------------------------------------------------------------

    @property
    def _ends_now(self) -> bool:
        """Whether the budget is used up within a thought."""
        budget = self._thought.budget
        if budget is None or self._phases.phase != "thought" or self._spent < budget:
            return False
        return self._decoder.whole or self._spent >= budget + _LATE

    def _end_ids(self) -> list[int]:
        end = self._phases.end
        return self._spelling.spelled(end.removeprefix(unfinished(self._phases.tail, end)))

    def _not_in_thought(self, form: Constraint) -> list[int]:
        """Tokens that would leave the answer without its form: those that end the text, and those that bring
        some of the answer with the mark which the grammar does not allow."""
        found = self._forbidden_ends(form)
        end = self._phases.end
        completing = self._spelling.completing(unfinished(self._phases.tail, end), end)
        spelled = self._spelling.spelled
        return found + [id for id, rest in completing if not self._accepted(spelled(rest))]

    def _forbidden_ends(self, form: Constraint) -> list[int]:
        """The tokens that end a text, where the answer must not be empty."""
        mask = form(()).mask
        return [] if mask is None else [id for id in self._spelling.stops if not _has(mask, id)]

    def _accepted(self, tokens: Sequence[int]) -> bool:
        """Whether an answer in form may begin with these tokens."""
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
            return mask  # no answer begins as the mark does
        return None if allowed is None else allowed | mask

    def _in_channels(self, output: Sequence[int]) -> Allowed:
        """The grammar knows channels. Without a budget left no further thought begins."""
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
