"""llama.cpp's ``/infill``: what stands between two texts, for models that were taught to fill in."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotcold.engine.text import MAX_STOP_LENGTH, MAX_STOPS
from hotcold.server.protocol import native
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Field, Fields, Items, Shape, Text, Whole, check_depth
from hotcold.server.protocol.filling import check_model, filled, plain_tokens
from hotcold.server.protocol.limits import LARGEST, MAX_EXTRA
from hotcold.server.protocol.native import NativeCall

_MOST = 2048  # tokens around the place, as in llama.cpp with its defaults
_MARKS = 4  # tokens: the three marks and BOS
#: What stands before a text of another file where the vocabulary has no token for that, as in llama.cpp.
_SNIPPET = "\n\n--- snippet ---\n\n"
#: Names that stand in prompts where nothing is known, as in llama.cpp.
_PROJECT, _THIS_FILE, _OTHER_FILE = "myproject\n", "filename\n", "tmp"

_EXTRA = Shape({"text": Field(Text(), required=True), "filename": Field(Text(0, 1024), _OTHER_FILE)})
FIELDS: Fields = {
    "input_prefix": Field(Text(), None, "The text before the gap.", required=True),
    "input_suffix": Field(Text(), None, "The text after the gap.", required=True),
    "input_extra": Field(
        Items(_EXTRA, 0, MAX_EXTRA), None, "Other files as context: objects with text and filename."
    ),
    "prompt": Field(Text(), "", "The beginning of the answer."),
    **{
        name: field for name, field in native.FIELDS.items() if name not in ("prompt", "input_extra")
    },
    "n_indent": Field(Whole(0, LARGEST), None, "Has no effect: editors send it, n_predict ends the answer."),
    "t_max_predict_ms": Field(Whole(-1, LARGEST), None, "Has no effect, like n_indent."),
}  # fmt: skip
BODY = Shape(FIELDS)


@dataclass(frozen=True)
class InfillCall(NativeCall):
    """The job and options of one request; ``prompt`` is what the answer begins with."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...]  #: names and texts of other files

    @property
    def texts(self) -> list[str]:
        """All that the prompt is made of."""
        others = [text for each in self.extra for text in each]
        return [*others, self.prefix, self.suffix, str(self.prompt)]

    def encode(self) -> list[list[int]]:
        """llama.cpp's prompt: other files, if there are any, then prefix, suffix and the mark of the middle.
        Of a long prefix the end counts, of a long suffix the beginning, of other files the last."""
        known = self.facts
        begun = known.tokenizer.encode(str(self.prompt), add_bos=False, parse_special=True)
        most, longest = min(_MOST, known.context // 2), known.most_characters
        prefix = plain_tokens(known, self.prefix[-longest:])
        suffix = plain_tokens(known, self.suffix[:longest])
        prefix = prefix[max(0, len(prefix) - 3 * (most // 4)) :]
        suffix = suffix[: max(0, most // 4 - 2 - len(begun))]
        answer = min(self.job.max_tokens, known.context // 4)
        free_tokens = max(0, known.context - most - answer - _MARKS)
        others = self._other_files(free_tokens) if self.extra else []
        return [[*others, *filled(known, [*prefix, *begun], suffix)]]

    def shown(self, ids: Sequence[int]) -> str:
        """The prompt's text with its marks."""
        return b"".join(map(self.facts.tokenizer.piece, ids)).decode(errors="replace")

    def _other_files(self, free_tokens: int) -> list[int]:
        """The last ``free_tokens`` tokens of the repository's header. Without other files it would only make
        the model write on after the middle."""
        marks, longest = self.facts.tokenizer.filling, self.facts.most_characters
        repository, file = marks.get("fim_rep"), marks.get("fim_sep")
        ids = [] if file is None else [file, *plain_tokens(self.facts, _THIS_FILE)]
        for name, text in reversed(self.extra):
            if len(ids) >= free_tokens:
                break
            head = plain_tokens(self.facts, _SNIPPET if file is None else name + "\n")
            head = head if file is None else [file, *head]
            ids = [*head, *plain_tokens(self.facts, text[-longest:]), *ids]
        if repository is not None:
            ids = [repository, *plain_tokens(self.facts, _PROJECT), *ids]
        return ids[max(0, len(ids) - free_tokens) :]


def parse(body: object, facts: Facts) -> InfillCall:
    """APIError for what is wrong, and for a model that fills nothing in."""
    check_depth(body)
    values = BODY.read(body, "")
    check_model(facts)
    facts.check_length(values["prompt"], "prompt")  # the rest is cut
    call = native.call_of(values, facts)
    suffix = values["input_suffix"]
    stop = (*call.job.stop, *_suffix_begins(suffix))
    if len(stop) <= MAX_STOPS:
        call = replace(call, job=replace(call.job, stop=stop))
    extra = [(each["filename"], each["text"]) for each in values["input_extra"] or ()]
    return InfillCall(**vars(call), prefix=values["input_prefix"], suffix=suffix, extra=tuple(extra))


def _suffix_begins(suffix: str) -> list[str]:
    """The stop string for a model that writes on into the suffix: the suffix's first whole line with a letter
    or a digit. Lines of brackets alone end inner blocks, too."""
    line = re.search(r"(?:^|\n)[^\n]*\w[^\n]*\n", suffix)
    return [line[0]] if line and len(line[0]) <= MAX_STOP_LENGTH else []
