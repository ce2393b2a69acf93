"""A conversation with a loaded model in the terminal: it asks, generates and prints answers."""

import sys
from dataclasses import replace

from hotcold.chat.chat import AnswerStream, Chat, Part
from hotcold.chat.messages import Message, TemplateValue, check_messages
from hotcold.commands.conversation import Conversation
from hotcold.commands.display import Display, display
from hotcold.commands.echo import unseen_typing
from hotcold.commands.figures import figures_of, print_figures, short_figures
from hotcold.commands.interrupts import Interrupts
from hotcold.commands.options import note_left_out
from hotcold.engine.engine import Engine
from hotcold.engine.generation import stream
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import speculation_of
from hotcold.errors import UserError
from hotcold.runtime.counters import Figures
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session


def say(text: str) -> None:
    """Prints a line of the program, not of the model, to stderr."""
    print(text, file=sys.stderr, flush=True)


class Terminal:
    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        params: SamplingParams,
        interrupts: Interrupts,
        *,
        max_tokens: int,
        plain: bool = False,
    ) -> None:
        """``plain``: whether answers are printed as in a pipe, on any standard output."""
        model = session.model
        self.session, self.conversation, self.params = session, conversation, params
        self.max_tokens = max_tokens
        self.values: dict[str, TemplateValue] = {}  #: values for the template
        self.interrupted = False  #: whether Ctrl-C ended the last answer
        self.figures = True  #: whether answers end with a line of figures
        self.verbose = False  #: whether this line has all figures
        self.chat = Chat(model.tokenizer, model.chat_metadata, model.name)
        self._engine = Engine(session, speculation=speculation_of(session))
        self._interrupts = interrupts
        self._last: list[str] = []  # figures of the last answer
        self._used = 0  # positions of the last answer
        self._left_out = 0  # the message that the last prompt began with, beside the system's
        self._plain = plain
        self._ended: Message | None = None  # the last answer that the model itself has ended

    def greet(self, interactive: bool) -> None:
        if self.chat.template_note:
            say(f"note: {self.chat.template_note}")
        if interactive:
            session = self.session
            sparsity = f", sparsity {session.sparsity}" if session.sparsity != "off" else ""
            say(f"{session.model.name}{sparsity}, context of {session.model.context} tokens")
            say("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends\n")

    def ask(self, text: str) -> None:
        """Answers a message of the user. UserError: it cannot be answered, and is not part of the
        conversation."""
        note_left_out(self.session.model.tokenizer, text)
        before = list(self.conversation.messages)
        self.conversation.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except UserError:
            self.conversation.messages = before
            raise

    def again(self) -> None:
        """Replaces the last answer by another one. UserError: nothing was asked."""
        messages = self.conversation.messages
        if self.conversation.answered:
            self.conversation.messages = messages[:-1]
        if not self.conversation.messages or self.conversation.messages[-1]["role"] != "user":
            self.conversation.messages = messages
            raise UserError("there is no message to answer yet")
        try:
            self._answer()
        except UserError:
            self.conversation.messages = messages
            raise

    def more(self) -> None:
        """Continues the last answer. UserError: there is none, or the model ended it."""
        if not self.conversation.answered:
            raise UserError("there is no answer to continue")
        if self.conversation.messages[-1] is self._ended:
            raise UserError("the last answer is complete: write a message, or /retry for another answer")
        self._answer(go_on=True)

    def stats(self) -> None:
        say(f"{self._used} of {self.session.model.context} tokens of the context are in use")
        for detail in self.session.details:
            say(detail)
        if self._last:
            print_figures(self._last, plain=self._plain)

    def close(self) -> None:
        self.chat.close()

    def _answer(self, go_on: bool = False) -> None:
        with unseen_typing():  # until its figures and notes are printed, too
            self._answer_and_figures(go_on)

    def _answer_and_figures(self, go_on: bool) -> None:
        messages = self.conversation.messages
        ids = self._prompt(go_on)
        beginning = messages[-1]["content"] if go_on else None
        thought = self.chat.thought(ids, kwargs=self.values, beginning=beginning)
        job = Job(
            ids,
            self.params,
            max_tokens=self.max_tokens,
            shown=self.chat.shown,
            thought=thought,
            borders=self.chat.borders(ids, messages),
        )
        request = Request(job)
        self._engine.check(request)
        divide = self.chat.stream(thought is not None and thought.opened, begun=go_on)
        before = self.session.counters.copy()
        printer = Printer(display(plain=self._plain), messages[-1]["content"] if go_on else None)
        try:
            self._print(request, divide, printer)
        finally:
            printer.end()
            said = {"role": "assistant", "content": printer.content}
            if printer.reasoning:
                said["reasoning_content"] = printer.reasoning
            if go_on:
                said["content"] = messages[-1]["content"] + printer.content
                self.conversation.messages = [*messages[:-1], {**messages[-1], **said}]
            else:
                self.conversation.messages = [*messages, said]
        if request.finish_reason == "stop":
            self._ended = self.conversation.messages[-1]
        figures = Figures.from_counters(self.session.counters.since(before), self.session.footprint)
        self._last, self._used = figures_of(request, figures), request.length
        if self.figures:
            shown = self._last if self.verbose else short_figures(request, figures)
            print_figures(shown, plain=self._plain)
        if request.context_full:
            say(
                f"note: the context of {self.session.model.context} tokens is full: /clear empties it, and "
                "-c sets a larger one"
            )
        elif request.finish_reason == "length":
            say(f"note: cut after {self.max_tokens} tokens: /more continues, /set n sets another limit")

    def _prompt(self, go_on: bool) -> list[int]:
        """Returns the tokens of the last messages, as many as leave space for an answer in the context.
        Prints a note once about messages that are left out."""
        messages, context = self.conversation.messages, self.session.model.context
        first = 1 if self.conversation.system else 0
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "user"]
        starts = [first, *turns[1:]]
        if self._left_out not in starts:
            self._left_out = first
        for start in starts[starts.index(self._left_out) :]:
            kept = messages[:first] + messages[start:]
            ids = self.chat.ids(check_messages(kept), kwargs=self.values, continue_last=go_on)
            if len(ids) + min(self.max_tokens, context // 4) <= context:
                break
        if len(ids) >= context:
            fix = "shorten it, use /clear, or start with a larger -c"
            raise UserError(
                f"the last message needs {len(ids)} tokens, and the context holds {context}: {fix}"
            )
        if start != self._left_out:
            self._left_out = start
            say(f"note: the first {start - first} messages no longer fit in the context and are left out")
        return ids

    def _print(self, request: Request, divide: AnswerStream, printer: "Printer") -> None:
        """Prints an answer as it is generated. Ctrl-C ends it; the part so far stays."""
        self.interrupted = False
        try:
            with self._interrupts.heard():
                for piece in stream(self._engine, request):
                    printer.show(divide.push(piece.text))
        except KeyboardInterrupt:
            self.interrupted = True
            self._engine.abort(request)
        printer.show(divide.finish())

    def set_params(self, **values: object) -> None:
        """UserError: a value that is not allowed."""
        self.params = replace(self.params, **values)  # type: ignore[arg-type]


class Printer:
    """Collects the parts of an answer and prints them. ``before`` is the answer that it continues, if any."""

    def __init__(self, display: Display, before: str | None = None) -> None:
        self.content = ""
        self.reasoning = ""
        self._display = display
        self._bare = before is None  # spaces at the beginning are not shown
        if before is not None:
            display.resume(before)

    def show(self, parts: list[Part]) -> None:
        for part in parts:
            if part.kind == "reasoning":
                self.reasoning += part.text
                self._display.write(part.text, thinking=True)
            elif part.kind == "content":
                self.content += part.text
                text = part.text.lstrip() if self._bare else part.text
                self._bare &= not text
                self._display.write(text)

    def end(self) -> None:
        self._display.end()
