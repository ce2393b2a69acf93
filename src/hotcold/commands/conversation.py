"""A conversation whose turns can be undone and repeated, and which can be saved and loaded."""

import json
from pathlib import Path
from typing import Any

from hotcold.chat.messages import Message, check_messages, content_text
from hotcold.errors import UserError
from hotcold.formats.files import write_text
from hotcold.tasks.texts import read_text
from hotcold.values import printable


class Conversation:
    """A conversation. ``messages`` are the messages for :meth:`hotcold.LLM.chat`: perhaps a system message,
    then turns."""

    def __init__(self, system: str = "") -> None:
        self.messages: list[Message] = []
        self._file: Path | None = None  # the file that was saved or loaded before, and may be overwritten
        self.set_system(system)

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        first = self.messages[0] if self.messages else {"role": "user"}
        return str(first["content"]) if first["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Sets the system message, which comes first; an empty one removes it."""
        if self.system:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def clear(self) -> None:
        """Removes everything but the system message."""
        del self.messages[1 if self.system else 0 :]

    def undo(self) -> str | None:
        """Removes the last user message and everything after it. Returns the message; None if there is
        none."""
        for i in reversed(range(len(self.messages))):
            if self.messages[i]["role"] == "user":
                text = str(self.messages[i]["content"])
                del self.messages[i:]
                return text
        return None

    @property
    def answered(self) -> bool:
        """True if the last message is an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. UserError: the file exists, and was not saved or loaded by this
        conversation."""
        if path.exists() and path != self._file:
            raise UserError(f"{printable(str(path), 4096)} exists already: choose another name")
        write_text(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        self._file = path

    def load(self, path: Path) -> None:
        """Replaces this conversation by a file of :meth:`save`. UserError: the file is not a conversation."""
        if not path.is_file():
            raise UserError(f"{printable(str(path), 4096)} is not a file: give one that /save wrote")
        try:
            saved: Any = json.loads(read_text(path))
            messages = check_messages(saved["messages"])
            messages = [{**each, "content": content_text(each["content"])} for each in messages]
        except (KeyError, TypeError, RecursionError):
            raise UserError(
                f"{printable(str(path), 4096)} is not a conversation: give a file that /save wrote"
            ) from None
        except ValueError as error:
            raise UserError(f"{printable(str(path), 4096)} is not a conversation: {error}") from None
        self.messages, self._file = messages, path
