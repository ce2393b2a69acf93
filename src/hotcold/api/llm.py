"""The Python interface: text in, text out."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from hotcold.chat.answer import Answer, ChatPiece, answer_of, divided
from hotcold.chat.chat import ANSWER_TOKENS, Chat
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Generation, Piece, generate, stream
from hotcold.engine.request import MAX_LOGPROBS, Constraint, Request, Timings
from hotcold.engine.sampler import splitmix64
from hotcold.engine.text import stop_strings
from hotcold.errors import UserError
from hotcold.model.tokenizer import Tokenizer
from hotcold.runtime.opening import Source, opened
from hotcold.runtime.options import LLMOptions, Progress, check_names
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.values import whole

#: Token ids, taken as they are.
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
#: A text gets BOS where the model wants it.
Prompt: TypeAlias = str | Ids


class RequestOptions(TypedDict, total=False):
    """What :meth:`LLM.request` takes besides the prompt; all optional. Numbers may be NumPy's. How tokens are
    chosen is as the model's file recommends where it does (``llm.model.sampling``), else as stated here."""

    max_tokens: int  #: the most tokens to generate (200)
    ignore_eos: bool  #: never choose a token that ends the text (False)
    temperature: float  #: 0 is greedy (0.8)
    top_k: int  #: keep the k likeliest tokens; 0 keeps all (40)
    top_p: float  #: keep the likeliest tokens that together have this probability (0.95)
    min_p: float  #: drop tokens less likely than this times the likeliest (0.05)
    repeat_penalty: float  #: above 1 makes recent tokens less likely (1.0)
    repeat_last_n: int  #: how many tokens are recent; 0 is none, -1 all (64)
    frequency_penalty: float  #: taken from a logit for each time its token was generated, -2 to 2 (0)
    presence_penalty: float  #: taken once from logits of tokens that were generated, -2 to 2 (0)
    logit_bias: Mapping[int, float]  #: token id -> number added to its logit; minus infinity forbids it
    seed: int | None  #: 0 or more; the same seed gives the same text. None draws one
    #: states each token's log-probability and those of the likeliest, so many (0 to 20); None states nothing
    logprobs: int | None
    constraint: Constraint | None  #: asked before each token which may come next


class GenerationOptions(RequestOptions, total=False):
    """What :meth:`LLM.generate` and :meth:`LLM.stream` take besides the prompt; all optional."""

    #: one string or several, which end the text where they come up in it, and are no part of it; the last
    #: token is the one that completed such a string
    stop: str | Sequence[str] | None


class ChatOptions(GenerationOptions, total=False):
    """What :meth:`LLM.chat` and :meth:`LLM.stream_chat` take besides the messages; all optional. Here
    ``max_tokens`` is 512 unless it is given."""

    #: ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`` each
    tools: Sequence[Mapping[str, Any]]
    #: what the model's chat template may ask for, such as ``{"enable_thinking": False}``
    template_values: Mapping[str, bool | int | float | str]
    continue_last: bool  #: the last message, an assistant's, is the beginning of the answer (False)


class LLM:
    """A model, ready to continue text.

    >>> with LLM() as llm:
    ...     print(llm.generate("Once upon a time", max_tokens=50, seed=1))

    ``model`` is a GGUF file, None the small built-in model; a :class:`LoadedModel` shares its weights, and
    takes no options. ``progress`` is told of the phase ``loading``. Not for use from several threads at once.
    ``ValueError``: a file that is no model, or an option that does not fit it or the machine."""

    def __init__(
        self,
        model: Source = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        check_names(options, LLMOptions)
        self._engine: Engine | None = Engine(opened(model, options, progress).session())
        self._shared = isinstance(model, LoadedModel)
        self._template: Chat | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UserError("this LLM is closed: make another")
        return self._engine

    @property
    def model(self) -> LoadedModel:
        return self.engine.model

    @property
    def session(self) -> Session:
        """With ``notes`` on what ``sparsity="auto"`` chose and why, and counters of all that ran so far."""
        return self.engine.session

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Generator[Piece, None, None]:
        """Yields the continuation piece by piece; the last piece says how and when it ended. Leaving the loop
        early cancels the request. Text that may become a stop string is held back.

        >>> for piece in llm.stream("Once upon a time", stop="\\n"):
        ...     print(piece, end="", flush=True)

        ``ValueError``: the prompt does not fit in the context, an option is out of range, or no token can be
        chosen (then it comes after the text before it). ``TypeError``: an unknown option."""
        check_names(options, GenerationOptions)
        stop = stop_strings(options.pop("stop", None))
        request = self.request(prompt, **options)  # type: ignore[misc]
        self.engine.check(request)  # now, not at the first piece
        return stream(self.engine, request, stop)

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerationOptions]) -> Generation: ...
    @overload
    def generate(self, prompt: Ids, **options: Unpack[GenerationOptions]) -> Generation: ...
    @overload
    def generate(
        self, prompt: list[str] | Sequence[Ids], **options: Unpack[GenerationOptions]
    ) -> list[Generation]: ...
    @overload
    def generate(self, prompt: list[Prompt], **options: Unpack[GenerationOptions]) -> list[Generation]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[GenerationOptions]
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each of several, and returns when all are done. A prompt is a text or a
        sequence of token ids.

        Each of several gets the text that it gets alone with its own seed, :attr:`Generation.seed`: the first
        has the seed that was given, and the others' follow from that. One that fails has ``finish_reason``
        ``error`` and says why in :attr:`Generation.error`; the error of a single prompt is raised. Errors are
        those of :meth:`stream`."""
        check_names(options, GenerationOptions)
        stop = stop_strings(options.pop("stop", None))
        settings = settings_of(options, self.model.sampling)
        if not is_one(prompt):
            return self._several([*prompt], settings, stop)
        request = settings.request(self._ids(prompt))  # type: ignore[arg-type]
        self.engine.check(request)
        (done,) = generate(self.engine, [request], stop)
        if done.error is not None:
            raise done.error
        return done

    @property
    def template(self) -> Chat:
        """The model's chat template, and how it marks thinking and calls of tools."""
        if self._template is None:
            self._template = Chat(self.tokenizer, self.model.chat_metadata, self.model.name)
        return self._template

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """The answer to the last message of a conversation. Messages are dicts with ``role`` (system, user,
        assistant, tool) and ``content``; :attr:`Answer.message` is one for the next turn, which reads only
        what is new.

        >>> messages = [{"role": "user", "content": "Once upon a time there was a fox."}]
        >>> messages.append(llm.chat(messages).message)

        A model without a chat template continues the text of all messages: see docs/chat.md. ``ValueError``:
        messages that are no conversation, a template that cannot be rendered, and those of :meth:`stream`."""
        return answer_of([*self.stream_chat(messages, **options)])

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Generator[ChatPiece, None, None]:
        """:meth:`chat`, piece by piece; leaving the loop early cancels the answer.

        >>> for piece in llm.stream_chat(messages):
        ...     print(piece, end="", flush=True)"""
        check_names(options, ChatOptions)
        rest: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, **options}
        stop = stop_strings(rest.pop("stop", None))
        tools, values = rest.pop("tools", ()), rest.pop("template_values", None)
        continue_last = rest.pop("continue_last", False)
        ids = self.template.ids(messages, tools, kwargs=values, continue_last=continue_last)
        request = self.request(ids, **rest)
        request.shown = self.template.shown
        self.engine.check(request)
        parts = self.template.stream(self.template.opens_thinking(ids), tools)
        return divided(stream(self.engine, request, stop), parts)

    def request(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Request:
        """A request for ``llm.engine``, for those who run its steps themselves. Stop strings are for them to
        look for: see :class:`~hotcold.engine.text.TextStream`."""
        check_names(options, RequestOptions)
        return settings_of(options, self.model.sampling).request(self._ids(prompt))

    def close(self) -> None:
        """Frees the model, unless others share it. Using the LLM afterwards is a ValueError."""
        if self._engine is None:
            return
        if self._template is not None:
            self._template.close()
        if self._shared:
            self._engine.session.close()
        else:
            self._engine.model.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _several(
        self, prompts: list[Prompt], settings: "Settings", stop: tuple[str, ...]
    ) -> list[Generation]:
        check_each(prompts)
        done: list[Generation | None] = []
        requests = []
        for i, prompt in enumerate(prompts):
            own = settings.of_prompt(i)
            try:
                request = own.request(self._ids(prompt))
                self.engine.check(request)
            except UserError as error:
                done.append(own.refused(error))
            else:
                done.append(None)
                requests.append(request)
        ran = iter(generate(self.engine, requests, stop))
        return [next(ran) if each is None else each for each in done]

    def _ids(self, prompt: Prompt) -> list[int]:
        return ids_of(self.tokenizer, prompt)


#: What the functions of the package take as a model.
Model: TypeAlias = Source | LLM


def source_of(model: Model) -> Source:
    """Of an LLM, what was loaded for it."""
    return model.model if isinstance(model, LLM) else model


@dataclass(frozen=True)
class Settings:
    """What requests of one call share, checked."""

    params: SamplingParams
    fields: dict[str, Any]  #: of :class:`Request`, as they were given

    def request(self, ids: list[int]) -> Request:
        return Request(ids, self.params, **self.fields)

    def of_prompt(self, index: int) -> Self:
        """Those of one prompt of several: with a seed of its own, which makes other random numbers."""
        seed = self.params.seed
        if index == 0 or seed is None:
            return replace(self, params=self.params.with_seed())
        return replace(self, params=replace(self.params, seed=splitmix64(seed, index) >> 1))

    def refused(self, error: UserError) -> Generation:
        """For a prompt that cannot run."""
        assert self.params.seed is not None
        return Generation("", (), (), "error", None, False, 0, self.params.seed, Timings(), error)


#: Options that are a request's own; all others say how its tokens are chosen.
_OF_THE_REQUEST = ("max_tokens", "ignore_eos", "logprobs", "constraint")


def settings_of(options: Mapping[str, Any], base: SamplingParams) -> Settings:
    """Of :class:`RequestOptions`, and of ``base`` what they do not say; UserError for a value that is not
    allowed."""
    rest: dict[str, Any] = dict(options)
    own: dict[str, Any] = {name: rest.pop(name) for name in _OF_THE_REQUEST if name in rest}
    if "max_tokens" in own:
        own["max_tokens"] = whole("max_tokens", own["max_tokens"], 1)
    if own.get("logprobs") is not None:
        own["logprobs"] = whole("logprobs", own["logprobs"], 0, MAX_LOGPROBS, "None states nothing")
    return Settings(replace(base, **rest), own)


def ids_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """A prompt's token ids; UserError for what is none."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists among the numbers
        ids = np.asarray(prompt, object)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        seen = str(ids.dtype) if ids.ndim == 1 else f"{ids.dtype} in {ids.ndim} dimensions"
        raise UserError(f"the prompt holds {seen}: token ids, whole numbers, are needed")
    found: list[int] = ids.tolist()
    return found


def is_one(prompt: object) -> bool:
    """Whether this is one prompt: a text, an array, or a sequence that begins with a number."""
    if not isinstance(prompt, str | np.ndarray | Sequence) or isinstance(prompt, bytes | bytearray):
        kind = type(prompt).__name__
        raise UserError(f"a prompt is of type {kind}: a text, token ids, or a list of these is needed")
    if isinstance(prompt, str | np.ndarray):
        return True
    return len(prompt) > 0 and isinstance(prompt[0], Real)


def check_each(prompts: Sequence[Prompt]) -> None:
    """UserError: among several prompts is what cannot be one."""
    for prompt in prompts:
        if not is_one(prompt) and len(prompt):
            raise UserError("a prompt in a list is a list: a text or a sequence of token ids is needed")
