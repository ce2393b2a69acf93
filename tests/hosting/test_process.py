"""The engine process as its front sees it, through two pipes; and the pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, Timings
from hotcold.hosting.host import encoded
from hotcold.hosting.messages import (
    Abort,
    Close,
    Failure,
    Load,
    LoadFailed,
    Loading,
    Ready,
    Step,
    Submit,
    decode,
    encode,
)
from hotcold.processes import plain_data
from hotcold.processes.channel import Reader, Writer
from hotcold.processes.plain_data import HEADER, PlainDataError, Unpacker, pack
from hotcold.runtime.sampling import SamplingParams

LIMIT_S = 240
COMMAND = [sys.executable, "-P", "-m", "hotcold.hosting"]
ENDLESS = Job([9], SamplingParams(temperature=0), max_tokens=1000, ignore_eos=True)


class Process:
    """An engine process; what it tells is read in a thread."""

    def __init__(self, before: str = "") -> None:
        command = COMMAND
        if before:  # runs first, in the same process
            main = "import sys; from hotcold.hosting.__main__ import main; sys.exit(main())"
            command = [sys.executable, "-P", "-c", f"{before}\n{main}"]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.child.stdin and self.child.stdout
        self.stdin = self.child.stdin
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = Reader(os.dup(self.child.stdout.fileno()))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.stdin.write(encode(message))
        self.stdin.flush()

    def wait(self, kind: type[Any]) -> Any:
        while True:
            message = self.messages.get(timeout=LIMIT_S)
            assert message is not None, self.errors()
            if isinstance(message, kind):
                return message

    def ended(self) -> int:
        return self.child.wait(LIMIT_S)

    def errors(self) -> str:
        assert self.child.stderr
        return self.child.stderr.read().decode()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self._thread.join(LIMIT_S)
        self._reader.close()
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        while (found := self._reader.read()) is not None:
            self.messages.put(decode(*found))
        self.messages.put(None)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_it_runs_jobs_until_it_is_told_to_end(process: Process) -> None:
    process.send(Load(None, {"threads": 1}))
    assert process.wait(Loading).total > 0
    assert process.wait(Ready).info.slots == 1
    process.send(Submit(1, ENDLESS))
    process.wait(Step)
    process.send(Close())
    assert process.ended() == 0
    assert process.errors() == ""


@pytest.mark.parametrize("when", ["at once", "loading", "running", "within a message"])
def test_it_ends_when_its_front_has_gone(process: Process, when: str) -> None:
    if when != "at once":
        process.send(Load(None, {"threads": 1}))
    if when in ("running", "within a message"):
        process.wait(Ready)
        process.send(Submit(1, ENDLESS))
        process.wait(Step)
    if when == "within a message":
        process.stdin.write(encode(Submit(2, ENDLESS))[:-1])
    process.stdin.close()
    assert process.ended() == 0
    assert process.errors() == ""


def test_a_load_that_takes_for_ever_does_not_keep_it_alive() -> None:
    """Its front goes while a thread of it is deep in loading."""
    before = (
        "import hotcold.runtime.opening as opening, sys, time\n"
        "def opened(*_):\n"
        "    print('loading', file=sys.stderr, flush=True)\n"
        "    time.sleep(600)\n"
        "opening.opened = opened\n"
    )
    process = Process(before)
    try:
        process.send(Load(None))
        assert process.child.stderr and process.child.stderr.readline() == b"loading\n"
        process.stdin.close()
        assert process.ended() == 0
    finally:
        process.close()


def test_a_model_that_cannot_be_loaded_is_told_in_a_line(process: Process, tmp_path: Path) -> None:
    process.send(Load(str(tmp_path / "none.gguf")))
    message = process.wait(LoadFailed).message
    assert "none.gguf" in message and "\n" not in message
    assert process.ended() == 70


def test_a_draft_model_without_room_is_told_in_a_line() -> None:
    """Its session is made after the model is loaded, and may find that memory is gone by then."""
    before = (
        "import hotcold.hosting.host as host\n"
        "from hotcold.errors import UserError\n"
        "def no_room(session): raise UserError('not enough memory for the draft')\n"
        "host.speculation_of = no_room\n"
    )
    process = Process(before)
    try:
        process.send(Load(None, {"threads": 1}))
        assert process.wait(LoadFailed).message == "not enough memory for the draft"
        assert process.ended() == 70
        assert process.errors() == ""
    finally:
        process.close()


def test_a_defect_of_loading_is_told_too(process: Process) -> None:
    process.send(Load(None, {"nonsense": 1}))
    assert "please report" in process.wait(LoadFailed).message
    assert process.ended() == 70
    assert "nonsense" in process.errors()


@pytest.mark.parametrize(
    "data",
    [
        pack(["Nothing", {}]),
        pack(["Submit", {"id": "x"}]),
        HEADER.pack(0xFFFFFFFF, 0),
        HEADER.pack(4, 0) + b"oops",
    ],
)
def test_what_it_does_not_understand_ends_it(process: Process, data: bytes) -> None:
    """It must not go on with a stream that it has lost its place in."""
    process.send(Load(None, {"threads": 1}))
    process.wait(Ready)
    process.stdin.write(data)
    process.stdin.flush()
    assert process.ended() == 70
    assert "invalid message" in process.errors()


def test_what_is_printed_does_not_get_between_messages() -> None:
    before = (
        "import hotcold.runtime.opening as opening, os, sys\n"
        "opened = opening.opened\n"
        "def loud(*args):\n"
        "    print('printed')\n"
        "    os.write(1, b'written\\n')\n"
        "    os.system('echo by a child')\n"
        "    assert sys.stdin.read() == ''\n"
        "    return opened(*args)\n"
        "opening.opened = loud\n"
    )
    process = Process(before)
    try:
        process.send(Load(None, {"threads": 1}))
        process.wait(Ready)
        process.send(Close())
        assert process.ended() == 0
        assert {"written", "by a child"} <= set(process.errors().split("\n"))
    finally:
        process.close()


def test_importing_the_process_does_nothing_else() -> None:
    """Slow imports begin when signals are ignored already."""
    code = "import sys, hotcold.hosting.__main__; print('numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_reader_takes_messages_as_they_come() -> None:
    reading, writing = os.pipe()
    reader = Reader(reading)
    os.write(writing, pack({"a": 1}) + pack([], [7, -7]))
    assert reader.read() == ({"a": 1}, array("i"))
    assert reader.read() == ([], array("i", [7, -7]))
    os.write(writing, pack([1, 2, 3])[:-2])
    os.close(writing)
    assert reader.read() is None and reader.read() is None
    reader.close()


def test_a_writer_keeps_the_order_and_writes_all_that_was_queued() -> None:
    reading, writing = os.pipe()
    gone: list[int] = []
    writer = Writer(writing, lambda: gone.append(1))
    large = "x" * 300_000  # more than a pipe takes
    for i in range(20):
        writer.write(lambda i=i: pack([i, large]))
    reader, found = Reader(reading), []
    closing = threading.Thread(target=writer.close)
    closing.start()
    while (message := reader.read()) is not None:
        assert message[0][1] == large
        found.append(message[0][0])
    closing.join(LIMIT_S)
    reader.close()
    assert found == list(range(20)) and not gone


@pytest.mark.parametrize("how", ["closed", "does not read", "defect"])
def test_a_writer_says_once_that_nobody_reads(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    gone = threading.Semaphore(0)
    writer = Writer(writing, gone.release, patience_s=0.05)
    if how == "closed":
        os.close(reading)

    def message() -> bytes:
        if how == "defect":
            raise PlainDataError("too long")
        return bytes(1 << 20)

    for _ in range(5000):  # more than may wait: those after it are dropped
        writer.write(message)
    assert gone.acquire(timeout=LIMIT_S)
    writer.close()
    assert not gone.acquire(blocking=False)
    assert ("too long" in capfd.readouterr().err) == (how == "defect")
    if how != "closed":
        os.close(reading)


def test_a_step_that_cannot_be_written_fails_its_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MOST_BYTES", 2000)
    piece = Piece("x" * 3000, (1,), (), None, None, False, 1, 0, Timings())
    other = Failure(9, "too late", "deadline")
    put: list[Any] = []
    data = encoded(Step(((5, piece), (6, piece)), (other,)), put.append)
    ((plain, numbers),) = Unpacker().push(data)
    step = decode(plain, numbers)
    assert step.pieces == () and other in step.failures
    assert {each.id: each.code for each in step.failures} == {
        5: "engine_failed",
        6: "engine_failed",
        9: "deadline",
    }
    assert put == [Abort(5), Abort(6)]
