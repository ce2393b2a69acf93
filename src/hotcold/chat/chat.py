"""Conversations with one model: its chat template turns messages into tokens."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotcold.chat.borders import borders_of, openings_of
from hotcold.chat.call_ids import CallIds, call_ids_of
from hotcold.chat.harmony import EFFORTS, HarmonyStream
from hotcold.chat.messages import Message, TemplateValue, content_text
from hotcold.chat.prompt import CALL_MARKS, fitted
from hotcold.chat.rendering import TemplateError, TemplateProcess, TemplateStopped
from hotcold.chat.stand_ins import StandIns, encode_rendered, stand_ins, texts_of, unused
from hotcold.chat.stream import AnswerStream as AnswerStream
from hotcold.chat.stream import ChatStream as ChatStream
from hotcold.chat.stream import Part as Part
from hotcold.chat.thinking import (
    EFFORT_BUDGETS,
    CallOpening,
    call_opening,
    is_off,
    leaves_open,
    opens_thinking,
    thinking_of,
)
from hotcold.chat.tool_formats import GENERAL, HARMONY, ToolFormat, is_harmony, knows_tools, tool_format
from hotcold.chat.traits import Traits, needs_parts, needs_tools, probes, traits_of
from hotcold.engine.request import PromptTooLongError
from hotcold.engine.thought import Thought
from hotcold.formats.gguf_values import MAX_TEMPLATE_BYTES
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import shown

ANSWER_TOKENS = 512  #: default limit of an answer in a conversation, in tokens
PARAGRAPH = "\n\n"  #: without a template: the text before a user's message
#: Matches templates that read ``thinking`` (DeepSeek's, Granite's); others read ``enable_thinking``.
_OTHER_NAME = re.compile(r"\bthinking is (?:not )?defined\b|\bif (?:not )?thinking\b")
_TAIL = 32  # end of a prompt, in tokens: long enough for the text that opens thinking, and spaces
_TEMPLATE = "tokenizer.chat_template"
_SPECIAL_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "sep_token": "seperator", "cls_token": "cls", "mask_token": "mask",
}  # fmt: skip


class Chat:
    """The conversations of one model: its template, its tokenizer, and its marks of thinking and calls.

    ``metadata`` is the GGUF file's; ``name`` is for error messages. The first :meth:`ids` raises errors in
    the template. Several threads may use an instance at once."""

    def __init__(self, tokenizer: Tokenizer, metadata: Mapping[str, Any], name: str = "") -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._templates = {
            which: text
            for which, key in (("", _TEMPLATE), ("tool_use", f"{_TEMPLATE}.tool_use"))
            if isinstance(text := metadata.get(key), str) and text
        }
        self._special = _special_tokens(tokenizer, metadata)
        self._process = TemplateProcess()
        self._traits: dict[str, Traits] = {}  # template -> its traits
        text = self.template or ""
        with_tools = self._templates.get("tool_use", text)
        #: the model's format of calls
        self.tool_format: ToolFormat = tool_format(with_tools)
        self._harmony = is_harmony(text, tokenizer.control_names.values())
        if self._harmony:
            self.tool_format = HARMONY
        #: the form of call ids that the template requires
        self.call_ids: CallIds = call_ids_of(with_tools, self.tool_format)
        self._thinking = None if self._harmony else thinking_of(text)
        #: control tokens that :meth:`stream` needs in an answer's text (``Job.shown``)
        self.shown = self._shown()

    @property
    def template(self) -> str | None:
        """The source of the template in Jinja; None if the file has none."""
        return self._templates.get("") or self._templates.get("tool_use")

    @property
    def lists_tools(self) -> bool:
        """True if the template itself describes tools."""
        return knows_tools(self._templates.get("tool_use") or self.template or "")

    @property
    def has_template(self) -> bool:
        return self.template is not None

    @property
    def template_note(self) -> str | None:
        """A note on a missing template, for the user; None if there is one."""
        if self.has_template:
            return None
        return "the model has no chat template: it continues the text of all messages (see docs/chat.md)"

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        kwargs: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        context: int | None = None,
    ) -> list[int]:
        """Returns the token ids of the prompt for the next answer. Rendering blocks.

        Messages, tools and ``kwargs`` (values for the template) must be valid: :func:`check_messages`,
        :func:`check_tools` and :func:`check_values` check untrusted ones. With ``continue_last`` the last
        message, an assistant's, is the beginning of the answer. Names of special tokens in messages stay
        text.

        Raises TemplateError if the template cannot render the messages. Raises RequestError if no process can
        render now, or, before encoding, if the prompt does not fit into ``context`` tokens."""
        begins = add_generation_prompt and not continue_last
        try:
            text, marks = self._text(messages, tools, self._values(kwargs), begins, continue_last)
        except TemplateStopped:
            if context is not None:
                self._check_length(context, [*texts_of(messages), *texts_of(tools)])
            raise
        if context is not None:
            self._check_length(context, [marks.restored(str.__str__(text))])
        ids = encode_rendered(self._tokenizer, text, marks)
        if not ids:
            raise TemplateError(
                "the model's chat template gives an empty prompt for these messages: add a message with text"
            )
        return ids

    def borders(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the positions in a prompt of :meth:`ids` up to which later prompts are likely to be equal
        (``Job.borders``). There are none if the template has no control tokens there."""
        return borders_of(ids, messages, openings_of(self._tokenizer, self.traits()))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        kwargs: Mapping[str, TemplateValue] | None = None,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> str:
        """Returns the text of the prompt of :meth:`ids`; names of control tokens in messages look like
        tokens."""
        begins = add_generation_prompt and not continue_last
        values = self._values(kwargs)
        text, marks = self._text(messages, tools, values, begins, continue_last)
        return marks.restored(str.__str__(text))

    def _check_length(self, context: int, texts: Sequence[str]) -> None:
        """Raises RequestError if texts cannot fit into the context together with an answer."""
        least = sum(map(self._tokenizer.least_tokens, texts))
        if least >= context:
            raise PromptTooLongError(least, context, at_least=True)

    def traits(self, *, tools: bool = False) -> Traits:
        """Returns the forms that the template (for tools) accepts. The first call renders probes, and
        blocks."""
        return self._traits_of(self._templates.get("tool_use" if tools else "") or self.template or "")

    @property
    def thinks(self) -> bool:
        """True if the template marks thinking."""
        return self._thinking is not None or self._harmony

    def opens_thinking(self, ids: Sequence[int]) -> bool:
        """Returns whether this prompt of :meth:`ids` opens the thinking, so that the answer continues it."""
        return opens_thinking(self._end_of(ids), self._thinking)

    def thought(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        kwargs: Mapping[str, TemplateValue] | None = None,
        beginning: str | None = None,
        budget: int | None = None,
    ) -> Thought | None:
        """Returns the thinking that may precede the answer to this prompt of :meth:`ids`; None: not possible.

        ``beginning`` is the text of the last message, if the answer continues it. A call of one of ``tools``
        ends the thinking. ``kwargs`` that forbid thinking end it at once. Without a ``budget`` in tokens, an
        effort that the template does not support determines one."""
        values = kwargs or {}
        template, off = self.template or "", is_off(values)
        if budget is None and "reasoning_effort" not in template:
            budget = EFFORT_BUDGETS.get(str(values.get("reasoning_effort")))
        if self._harmony:
            return Thought(channels=True, budget=0 if off else budget) if beginning is None else None
        thinking = self._thinking
        if thinking is None:
            return None
        opened = self.opens_thinking(ids) or (beginning is not None and leaves_open(beginning, thinking))
        begun = beginning is not None or self._end_of(ids).rstrip().endswith(thinking.end)
        if off:
            budget = 0  # a model may begin thinking again after the template has closed it
        opening = self._opening(tools)
        return Thought(
            thinking.start,
            thinking.end,
            opened=opened,
            may_begin=not off and not begun,
            anywhere=thinking.anywhere,
            budget=budget,
            call=opening.pattern if opening else "",
            call_head=opening.head if opening else "",
        )

    def stream(
        self,
        prompt_opens_thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        sure: bool = False,
        form: bool = False,
        begun: bool = False,
    ) -> AnswerStream:
        """Returns the splitter of an answer's text, which must have the control tokens :attr:`shown`. Only
        calls of ``tools`` are recognised. ``sure``: a grammar enforces the tools' schemas. ``form``: a
        grammar enforces the answer's form. ``begun``: the last message is the answer's beginning."""
        opening = self._opening(tools)
        functions = [tool["function"] for tool in tools]
        schemas = {each["name"]: each.get("parameters") for each in functions}
        if self._harmony:
            return HarmonyStream(schemas, sure=sure)
        return ChatStream(
            self._thinking,
            self.tool_format if tools else None,
            opened=prompt_opens_thinking,
            tools=schemas,
            sure=sure,
            opening=opening,
            form=form and self._thinking is not None,
            begun=begun,
        )

    def close(self) -> None:
        """Ends the processes that render."""
        self._process.close()

    def _opening(self, tools: Sequence[Mapping[str, Any]]) -> CallOpening | None:
        names = (tool["function"]["name"] for tool in tools)
        return call_opening(self.tool_format, names, set(self._tokenizer.control_names.values()))

    def _end_of(self, ids: Sequence[int]) -> str:
        """Returns the end of a prompt's text, with the names of control tokens."""
        names = self._tokenizer.control_names
        last = ids[-_TAIL:]
        pieces = (names[id].encode() if id in names else self._tokenizer.piece(id) for id in last)
        return b"".join(pieces).decode(errors="replace")

    def _values(self, kwargs: Mapping[str, TemplateValue] | None) -> dict[str, TemplateValue]:
        values = dict(kwargs or {})
        if "enable_thinking" in values and _OTHER_NAME.search(self.template or ""):
            values.setdefault("thinking", values["enable_thinking"])
        if self._harmony and isinstance(effort := values.get("reasoning_effort"), str):
            values["reasoning_effort"] = EFFORTS.get(effort, effort)
        return values

    def _shown(self) -> tuple[int, ...]:
        wanted = {*self.tool_format.tokens, *(HARMONY.tokens if self._harmony else ())}
        if self._thinking is not None:
            wanted.update(self._thinking.tokens or (self._thinking.start, self._thinking.end))
        return tuple(id for id, name in self._tokenizer.control_names.items() if name in wanted)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        values: dict[str, TemplateValue],
        add_generation_prompt: bool,
        continue_last: bool,
    ) -> tuple[str, StandIns]:
        """Returns the rendered text with stand-ins, and the stand-ins."""
        shows_tools = bool(tools) and self.tool_format is not GENERAL
        template = self._templates.get("tool_use" if shows_tools else "") or self.template or ""
        if (size := len(template.encode(errors="replace"))) > MAX_TEMPLATE_BYTES:
            allowed = f"at most {MAX_TEMPLATE_BYTES} are allowed"
            raise TemplateError(f"the model's chat template has {size} bytes: {allowed}")
        if continue_last and messages[-1]["role"] != "assistant":
            got = shown(messages[-1]["role"])
            raise TemplateError(
                f"the last message has the role {got}: only one of the assistant can be continued"
            )
        texts = [template, *texts_of(messages), *texts_of(tools), *texts_of(values)]
        # ``end`` marks the end of the last message; the others replace the marks of calls.
        end, *of_calls = unused(1 + CALL_MARKS, texts)
        traits = self._traits_of(template)
        messages, tools = fitted(messages, tools, template, traits, self.tool_format, self.call_ids, of_calls)
        names = [*self._tokenizer.control_names.values()]
        texts = [template, *names, *texts_of(messages), *texts_of(tools), *texts_of(values)]
        marks = stand_ins([*names, end, *of_calls], texts)
        if continue_last:
            _mark_end(messages[-1], end)
        if not template:
            return marks.replaced(_plain_text(messages).removesuffix(end)), marks
        request = {
            "template": template,
            "stand_ins": [marks.plain, marks.marked],
            "messages": messages,
            "users": values,
            "values": {**self._special, "add_generation_prompt": add_generation_prompt, "documents": None},
        }
        request["users" if tools else "values"]["tools"] = tools or None  # type: ignore[index]
        text = self._process.render(request)
        for mark, name in zip(of_calls, self.tool_format.tokens, strict=False):
            text = text.replace(marks.forward[ord(mark)], name)
        if not continue_last:
            return text, marks
        end = marks.forward[ord(end)]
        if end not in text:
            raise TemplateError(
                "the model's chat template drops the last message, so it cannot be "
                "continued: add a new message"
            )
        return text[: text.rindex(end)], marks

    def _traits_of(self, template: str) -> Traits:
        """Returns a template's traits, determined once. A template that cannot be probed has the default
        ones: rendering it will report the error."""
        if template not in self._traits:
            self._traits[template] = self._probe_traits(template) if template else Traits()
        return self._traits[template]

    def _probe_traits(self, template: str) -> Traits:
        request = {
            "template": template,
            "stand_ins": ["", ""],
            "users": {},
            "values": {**self._special, "add_generation_prompt": True, "documents": None},
        }
        try:
            texts = self._process.probe({**request, "probes": probes()})
            if tools := needs_tools(texts):
                texts = self._process.probe({**request, "probes": probes(tools=True)})
            if needs_parts(texts):
                others = self._process.probe({**request, "probes": probes(True, tools)})
                texts = [*texts[:2], *others[2:]]
        except TemplateError:
            return Traits()
        return traits_of(texts)


def _joins(before: str, text: str) -> str:
    """Returns a space if an answer's text would otherwise join the word before it."""
    apart = not before or not text or before[-1].isspace() or not text[0].isalnum()
    return "" if apart else " "


def _special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of tokens as templates know them, without tokens that the file does not have."""
    tokens = {}
    for name, key in _SPECIAL_TOKENS.items():
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        id = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}.get(key, id)
        if isinstance(id, int) and 0 <= id < tokenizer.vocab_size:
            tokens[name] = tokenizer.piece(id).decode(errors="replace")
    return tokens


def _mark_end(message: Message, end: str) -> None:
    """Appends a mark to the text of a message."""
    content = message["content"]
    if isinstance(content, list) and content:
        last = content[-1]
        message["content"] = [*content[:-1], {**last, "text": last["text"] + end}]
    else:
        message["content"] = content_text(content) + end


def _plain_text(messages: list[Message]) -> str:
    """Joins messages to one text, for a model without a template. An answer continues the message before it;
    any other message begins a paragraph."""
    text = ""
    for message in messages:
        content = content_text(message["content"])
        if message["role"] == "assistant":
            text += _joins(text, content) + content
        elif content:
            text += f"{text and PARAGRAPH}{content}"
    return text
