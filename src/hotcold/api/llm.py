"""The Python interface: text in, text out."""

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack, overload

import numpy as np
import numpy.typing as npt

from hotcold.api.options import ChatOptions, Options, chat_job, job_of, refused
from hotcold.chat.answer import Answer, ChatPiece, answer_of, divided
from hotcold.chat.chat import Chat
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Generation, Piece, generate, stream
from hotcold.engine.request import Constraint, Job, Request
from hotcold.engine.speculation import speculation_of
from hotcold.errors import UserError
from hotcold.runtime.opening import Source, opened
from hotcold.runtime.options import LoadOptions, Progress, check_loading
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hotcold.grammar.constraint import Grammars

#: Token ids, used unchanged.
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
#: Vectors of texts, ``[D]`` or ``[texts, D]``.
Vectors: TypeAlias = npt.NDArray[np.float32]
#: A prompt. A text gets BOS if the model needs it.
Prompt: TypeAlias = str | Ids


class LLM:
    """A model, ready to continue text.

    >>> with LLM() as llm:
    ...     print(llm.generate("Once upon a time", max_tokens=50, seed=1))

    ``model`` is a GGUF file, None the small built-in model. A :class:`LoadedModel` shares its weights, and
    allows no options. ``progress`` is called during the phase ``loading``. Raises ValueError if the file is
    not a model, or if an option does not fit the model or the machine.

    Several threads may use one LLM. Their requests run together, and each gets the same text as alone. A
    thread that reads its stream slowly, or leaves it unfinished, delays no other thread."""

    def __init__(
        self,
        model: Source = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        check_loading(options, LoadOptions)
        self._engine: Engine | None = _engine(opened(model, options, progress).session())
        self._shared = isinstance(model, LoadedModel)
        self._making = threading.Lock()  # guards the next two fields, and close()
        self._template: Chat | None = None  # created at the first access
        self._grammars: Grammars | None = None  # created for the first grammar

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        model, session = self.model, self.session
        threads = "" if model.threads is None else f", threads={model.threads}"
        return f"LLM({model.name!r}, sparsity={session.sparsity!r}, context={model.context}{threads})"

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests. A program that calls ``engine.step`` must use the LLM from one
        thread: steps of other threads would take events of its requests."""
        engine = self._engine  # another thread may close this LLM
        if engine is None:
            raise UserError("this LLM is closed: create a new one")
        return engine

    @property
    def model(self) -> LoadedModel:
        return self.engine.model

    @property
    def session(self) -> Session:
        """The engine's session, with ``notes`` on the choice of ``sparsity="auto"``, and with counters."""
        return self.engine.session

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Piece, None, None]:
        """Yields the continuation in pieces; the last piece has the reason and the times of its end. Leaving
        the loop early cancels the request. Text that may become a stop string is held back.

        >>> for piece in llm.stream("Once upon a time", stop="\\n"):
        ...     print(piece, end="", flush=True)

        Raises ValueError if the prompt does not fit into the context, if an option is out of range, or, after
        the text so far, if no token can be sampled. Raises TypeError for an unknown option."""
        request = self.request(prompt, **options)
        self.engine.check(request)  # now, not at the first piece
        return stream(self.engine, request)

    @overload
    def generate(self, prompt: str, **options: Unpack[Options]) -> Generation: ...
    @overload
    def generate(self, prompt: Ids, **options: Unpack[Options]) -> Generation: ...
    @overload
    def generate(self, prompt: list[str] | Sequence[Ids], **options: Unpack[Options]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: list[Prompt], **options: Unpack[Options]) -> list[Generation]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each prompt of a list, and returns when all have ended. A prompt is a text
        or a sequence of token ids.

        Each prompt of a list gets the same text as alone with its own seed, :attr:`Generation.seed`. The
        first has the given seed, which determines the others. An error of one prompt is in
        :attr:`Generation.error`, with the ``finish_reason`` ``error``; the error of a single prompt is
        raised. Errors are the same as of :meth:`stream`."""
        job, constraint = job_of(options, self.model.sampling), options.get("constraint")
        if not is_one(prompt):
            return self._several([*prompt], job, constraint)
        request = self._request(self._of(prompt, job), constraint)  # type: ignore[arg-type]
        self.engine.check(request)
        (generation,) = generate(self.engine, [request])
        if generation.error is not None:
            raise generation.error
        return generation

    def embed(self, prompt: Prompt | Sequence[Prompt]) -> Vectors:
        """Returns the vector of a text, ``[D]``, or of each text of a list, ``[texts, D]``, with norm 1. The
        model's file must name a pooling, or the option ``pooling`` must. A text's vector does not depend on
        other texts.

        >>> near = llm.embed(["a fox", "a vixen"])
        >>> print(near[0] @ near[1])

        Raises ValueError if the model cannot make vectors, or if a text does not fit into the context."""
        prompts = embedded(prompt)
        job = Job(max_tokens=1, pooling=self.model.pooling)
        requests = [self._request(self._of(each, job), None) for each in prompts]
        for request in requests:
            self.engine.check(request)
        self.engine.run(requests)
        return vectors([request.vector for request in requests], is_one(prompt))

    @property
    def template(self) -> Chat:
        """The model's chat template, and how it marks thinking and calls of tools."""
        with self._making:
            if self._template is None:
                self._template = Chat(self.tokenizer, self.model.chat_metadata, self.model.name)
            return self._template

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """Returns the answer to the last message of a conversation. Messages are dicts with ``role`` (system,
        user, assistant, tool) and ``content``. Append :attr:`Answer.message` for the next turn, which then
        computes only the new tokens.

        >>> messages = [{"role": "user", "content": "Once upon a time there was a fox."}]
        >>> messages.append(llm.chat(messages).message)

        A model without a chat template continues the text of all messages: see docs/chat.md. Raises
        ValueError for invalid messages, for an error of the template, and like :meth:`stream`."""
        return answer_of([*self.stream_chat(messages, **options)])

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Generator[ChatPiece, None, None]:
        """Streams the answer of :meth:`chat`; leaving the loop early cancels it.

        >>> for piece in llm.stream_chat(messages):
        ...     print(piece, end="", flush=True)"""
        job, parts = chat_job(self.template, messages, options, self.model.sampling)
        request = self._request(job, options.get("constraint"))
        self.engine.check(request)
        return divided(stream(self.engine, request), parts)

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """Returns a request for ``llm.engine``, for programs that call its ``step``. They must look for stop
        strings: :class:`~hotcold.engine.generation.Continuation` does."""
        job = job_of(options, self.model.sampling)
        return self._request(self._of(prompt, job), options.get("constraint"))

    def close(self) -> None:
        """Frees the model after the current step, unless other objects share it. Later calls of the LLM, and
        running requests of other threads, raise ValueError."""
        with self._making:
            engine, self._engine = self._engine, None
        if engine is not None and self._shared:
            engine.session.close()
        elif engine is not None:
            engine.model.close()
        for process in (self._template, self._grammars):
            if process is not None:
                process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _several(self, prompts: list[Prompt], job: Job, constraint: Constraint | None) -> list[Generation]:
        check_each(prompts)
        results: list[Generation | None] = []
        requests = []
        for i, prompt in enumerate(prompts):
            nth_job = job.nth(i)
            try:
                request = self._request(self._of(prompt, nth_job), constraint)
                self.engine.check(request)
            except UserError as error:
                results.append(refused(nth_job, error))
            else:
                results.append(None)
                requests.append(request)
        generations = iter(generate(self.engine, requests))
        return [next(generations) if each is None else each for each in results]

    def _of(self, prompt: Prompt, job: Job) -> Job:
        return replace(job, prompt=ids_of(self.tokenizer, prompt))

    def _request(self, job: Job, constraint: Constraint | None) -> Request:
        if job.grammar is not None:
            if constraint is not None:
                raise UserError("a grammar and a constraint are both given: give one of them")
            grammars = self._of_grammars()
            constraint = grammars.constraint(grammars.check(job.grammar))
        return Request(job, constraint)

    def _of_grammars(self) -> "Grammars":
        from hotcold.grammar.constraint import Grammars

        with self._making:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer)
            return self._grammars


def _engine(session: Session) -> Engine:
    return Engine(session, speculation=speculation_of(session))


#: A model as an argument of the package's functions.
Model: TypeAlias = Source | LLM


def source_of(model: Model) -> Source:
    """Returns the loaded model of an LLM; any other model is its own source."""
    return model.model if isinstance(model, LLM) else model


def ids_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Returns a prompt's token ids. Raises UserError if they are not whole numbers."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # a list with lists among the numbers
        ids = np.asarray(prompt, object)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        got = str(ids.dtype) if ids.ndim == 1 else f"{ids.dtype} with {ids.ndim} dimensions"
        raise UserError(f"the prompt is an array of {got}: a flat array of integer token ids is needed")
    token_ids: list[int] = ids.tolist()
    return token_ids


def embedded(prompt: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts to make vectors of. Raises UserError if there are none, or for other types."""
    if is_one(prompt):
        return [prompt]  # type: ignore[list-item]
    prompts: list[Prompt] = [*prompt]
    if not prompts:
        raise UserError("there are no texts: give at least one")
    check_each(prompts)
    return prompts


def vectors(rows: Sequence[tuple[float, ...] | None], single: bool) -> Vectors:
    """Returns the vectors of several prompts, or the vector of a single one."""
    array = np.array(rows, np.float32)
    return array[0] if single else array


def is_one(prompt: object) -> bool:
    """Returns whether a value is one prompt: a text, an array, or a sequence that begins with a number."""
    if not isinstance(prompt, str | np.ndarray | Sequence) or isinstance(prompt, bytes | bytearray):
        kind = type(prompt).__name__
        raise UserError(f"a prompt has the type {kind}: a text, token ids, or a list of these is needed")
    if isinstance(prompt, str | np.ndarray):
        return True
    return len(prompt) > 0 and isinstance(prompt[0], Real)


def check_each(prompts: Sequence[Prompt]) -> None:
    """Raises UserError if an entry of a list of prompts is a list of prompts."""
    for prompt in prompts:
        if not is_one(prompt) and len(prompt):
            raise UserError(
                "a list of prompts holds a list of texts: each prompt is a text or a flat list of token ids"
            )
