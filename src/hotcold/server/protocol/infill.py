"""llama.cpp's ``/infill``: the text between two others, for models that were trained to fill in."""

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

_MOST = 2048  # tokens before and after the place, as in llama.cpp by default
_MARKS = 4  # tokens: three marks and BOS
#: Heading of another file for a vocabulary without a token for it, as in llama.cpp.
_SNIPPET = "\n\n--- snippet ---\n\n"
#: Names of files and projects that are unknown, as in llama.cpp.
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
    """The job and options of one request. ``prompt`` is the beginning of the answer."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...]  #: names and texts of other files

    @property
    def texts(self) -> list[str]:
        """All texts that make the prompt."""
        other_files = [text for each in self.extra for text in each]
        return [*other_files, self.prefix, self.suffix, str(self.prompt)]

    def encode(self) -> list[list[int]]:
        """Returns llama.cpp's prompt: other files, prefix, suffix, and the mark of the middle. A long prefix
        loses its beginning, a long suffix its end, and of other files the last ones stay."""
        facts = self.facts
        beginning = facts.tokenizer.encode(str(self.prompt), add_bos=False, parse_special=True)
        near, longest = min(_MOST, facts.context // 2), facts.most_characters
        prefix = plain_tokens(facts, self.prefix[-longest:])
        suffix = plain_tokens(facts, self.suffix[:longest])
        prefix = prefix[max(0, len(prefix) - 3 * (near // 4)) :]
        suffix = suffix[: max(0, near // 4 - 2 - len(beginning))]
        answer = min(self.job.max_tokens, facts.context // 4)
        free_tokens = max(0, facts.context - near - answer - _MARKS)
        other_files = self._other_files(free_tokens) if self.extra else []
        return [[*other_files, *filled(facts, [*prefix, *beginning], suffix)]]

    def shown(self, ids: Sequence[int]) -> str:
        """Returns the prompt's text with its marks."""
        return b"".join(map(self.facts.tokenizer.piece, ids)).decode(errors="replace")

    def _other_files(self, free_tokens: int) -> list[int]:
        """Returns the last ``free_tokens`` tokens of the repository's header. Not for requests without other
        files: the model would then continue after the middle."""
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
    """Reads the body of a request. Raises APIError for wrong values, or if the model cannot fill in."""
    check_depth(body)
    values = BODY.read(body, "")
    check_model(facts)
    facts.check_length(values["prompt"], "prompt")  # the other texts are cut to fit
    call = native.call_of(values, facts)
    suffix = values["input_suffix"]
    stop = (*call.job.stop, *_suffix_begins(suffix))
    if len(stop) <= MAX_STOPS:
        call = replace(call, job=replace(call.job, stop=stop))
    extra = [(each["filename"], each["text"]) for each in values["input_extra"] or ()]
    return InfillCall(**vars(call), prefix=values["input_prefix"], suffix=suffix, extra=tuple(extra))


def _suffix_begins(suffix: str) -> list[str]:
    """Returns the stop string that ends an answer when it repeats the suffix: the first line of the suffix
    with a letter or a digit. Lines of brackets alone would also end inner blocks."""
    line = re.search(r"(?:^|\n)[^\n]*\w[^\n]*\n", suffix)
    return [line[0]] if line and len(line[0]) <= MAX_STOP_LENGTH else []
