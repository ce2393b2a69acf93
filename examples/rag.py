"""Answers questions from your own documents, with the sources of each answer.

An SQLite file keeps passages and their vectors. An embedding model finds the passages that are near a
question. A chat model answers from them, in JSON whose schema allows the passages' numbers alone.

    python examples/rag.py add notes.db embedder.gguf docs/*.md
    python examples/rag.py ask notes.db embedder.gguf chat.gguf "What is a hot neuron?"
"""

import json
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hotcold import LLM, Grammar
from hotcold.errors import UserError
from hotcold.runtime.pooling import Pooling

PASSAGE = 800  # characters
NEAREST, LONGEST = 4, 2000  # passages and characters of one answer
TABLE = "CREATE TABLE IF NOT EXISTS passages (file TEXT, text TEXT, vector BLOB)"
TASK = (
    "Answer from these passages alone. Write JSON: "
    '{"answer": "a sentence or two", "sources": [numbers of the passages that you used]}'
)
#: "mean" or "last" if the embedder's file names no pooling, as files of chat models.
POOLING: Pooling | None = None


def passages(text: str, longest: int = PASSAGE) -> list[str]:
    """Joins paragraphs to passages of at most this number of characters; a longer paragraph is divided."""
    found = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), longest):
            part = paragraph[start : start + longest].strip()
            if len(found[-1]) + len(part) > longest:
                found.append("")
            found[-1] = f"{found[-1]}\n\n{part}".strip()
    return [each for each in found if each]


def add(database: sqlite3.Connection, embedder: LLM, files: list[Path]) -> int:
    """Replaces the passages of these files; returns how many passages they have."""
    database.execute(TABLE)
    count = 0
    for file in files:
        texts = passages(file.read_text(encoding="utf-8"))
        vectors = embedder.embed(texts) if texts else []
        rows = [(str(file), text, vector.tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        with database:
            database.execute("DELETE FROM passages WHERE file = ?", (str(file),))
            database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
        count += len(rows)
    return count


def nearest(database: sqlite3.Connection, embedder: LLM, question: str) -> list[tuple[str, str]]:
    """The files and texts of the passages whose vectors are nearest to the question's, best first."""
    rows = database.execute("SELECT file, text, vector FROM passages").fetchall()
    if not rows:
        raise UserError("there are no passages: add files first")
    vectors = np.array([np.frombuffer(vector, np.float32) for _, _, vector in rows])
    order = np.argsort(-(vectors @ embedder.embed(question)))
    return [rows[i][:2] for i in order[:NEAREST]]


def ask(llm: LLM, found: list[tuple[str, str]], question: str, **options: Any) -> dict[str, Any]:
    """The answer to a question from passages: ``{"answer": text, "sources": [numbers from 1]}``."""
    number = {"type": "integer", "minimum": 1, "maximum": len(found)}
    schema = {
        "type": "object",
        "properties": {
            "answer": {"type": "string", "maxLength": LONGEST},
            "sources": {"type": "array", "items": number},
        },
        "required": ["answer", "sources"],
        "additionalProperties": False,
    }
    numbered = "\n\n".join(f"[{i}] {text}" for i, (_, text) in enumerate(found, 1))
    messages = [{"role": "user", "content": f"{TASK}\n\n{numbered}\n\n{question}"}]
    reply = llm.chat(messages, grammar=Grammar("json_schema", json.dumps(schema)), **options)
    if reply.error or reply.finish_reason != "stop":
        raise reply.error or UserError(f"the answer was cut ({reply.finish_reason}): allow more tokens")
    answer: dict[str, Any] = json.loads(reply.text)
    return answer


def main(arguments: list[str]) -> None:
    match arguments:
        case ["add", path, model, *files] if files:
            embedder = LLM(model, pooling=POOLING)
            print(add(sqlite3.connect(path), embedder, [*map(Path, files)]), "passages")
        case ["ask", path, model, chat, question]:
            sources = nearest(sqlite3.connect(path), LLM(model, pooling=POOLING), question)
            reply = ask(LLM(chat), sources, question)
            print(
                reply["answer"],
                *(f"[{i}] {sources[i - 1][0]}" for i in sorted({*reply["sources"]})),
                sep="\n",
            )
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError, sqlite3.Error) as error:
        sys.exit(f"error: {error}")
