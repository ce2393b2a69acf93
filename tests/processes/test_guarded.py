"""A process that answers lines: its bounds, its end, and that it starts anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotcold.errors import UserError
from hotcold.processes.guarded import GuardedProcess, ProcessDied, ProcessLost, ProcessTimeout

ANSWERS = """
import os, re, signal, sys, time
from hotcold.errors import UserError

def answer(request):
    match request["do"]:
        case "add":
            print("not an answer")
            return {"sum": request["a"] + request["b"], "pid": os.getpid()}
        case "for ever":
            while True:
                pass
        case "in C":
            re.match("(a+)+b", "a" * 100)
        case "sleep":
            time.sleep(600)
        case "as after its processor time":
            os.kill(os.getpid(), signal.SIGPROF)
        case "memory":
            return {"n": len(bytearray(request["bytes"]))}
        case "echo":
            return {"text": request["text"][::-1]}
        case "long":
            return {"text": "x" * request["n"]}
        case "refuse":
            raise UserError("three is too many")
        case "fail":
            raise KeyError("secret" * 100)
        case "exit":
            os._exit(3)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedProcess]:
    (tmp_path / "made_up_answers.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(tmp_path)  # the process imports what this one can
    made = GuardedProcess("made_up_answers", seconds=0.5, memory_bytes=64 << 20, output_bytes=1000)
    yield made
    made.close()


@pytest.mark.parametrize(
    "text", ["a\nb\r\n", "\u2028\x85\0\x1e", "\u00e9\u5b57\U0001f600", "\ud800a\udfff", '"\\']
)
def test_any_text_crosses(process: GuardedProcess, text: str) -> None:
    assert process.ask({"do": "echo", "text": text}) == {"text": text[::-1]}


def add(process: GuardedProcess, a: int = 1, b: int = 2) -> int:
    answer = process.ask({"do": "add", "a": a, "b": b})
    assert answer["sum"] == a + b
    return int(answer["pid"])


def gone(pid: int, seconds: float = 60) -> bool:
    """True if no such process runs any more; a process that was not waited for counts as gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_one_process_answers_many_questions(process: GuardedProcess) -> None:
    assert process.pid is None
    first = add(process)
    assert first == process.pid != os.getpid()
    assert add(process, 4, 5) == first


@pytest.mark.parametrize("do", ["for ever", "in C"])
def test_what_takes_too_long_is_stopped(process: GuardedProcess, do: str) -> None:
    before = add(process)
    with pytest.raises(ProcessTimeout, match=r"longer than 0\.5 s and was stopped") as caught:
        process.ask({"do": do})
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, UserError)
    assert gone(before)
    assert add(process) != before


@pytest.mark.parametrize(("do", "by_clock"), [("sleep", True), ("as after its processor time", False)])
def test_it_is_told_whether_the_clock_or_the_processor_time_was_over(
    process: GuardedProcess, do: str, by_clock: bool
) -> None:
    with pytest.raises(ProcessTimeout) as caught:
        process.ask({"do": do}, 0.05 if by_clock else 60)
    assert caught.value.by_clock is by_clock


def test_a_question_may_have_a_time_of_its_own(process: GuardedProcess) -> None:
    with pytest.raises(ProcessTimeout, match=r"longer than 0\.1 s"):
        process.ask({"do": "for ever"}, 0.1)
    patient = GuardedProcess("made_up_answers", seconds=0.001, memory_bytes=64 << 20, output_bytes=1000)
    assert patient.ask({"do": "add", "a": 1, "b": 2}, 60)["sum"] == 3
    patient.close()


def test_memory_is_bounded(process: GuardedProcess) -> None:
    before = add(process)
    assert process.ask({"do": "memory", "bytes": 8 << 20}) == {"n": 8 << 20}
    with pytest.raises(ProcessDied, match="failed: MemoryError"):
        process.ask({"do": "memory", "bytes": 256 << 20})
    assert add(process) != before


def test_an_answer_is_bounded(process: GuardedProcess) -> None:
    overhead = len('{"answer": {"text": ""}}\n')
    assert process.ask({"do": "long", "n": 1000 - overhead})["text"] == "x" * (1000 - overhead)
    with pytest.raises(ProcessDied, match="more than 1000 bytes"):
        process.ask({"do": "long", "n": 1000})
    with pytest.raises(ProcessDied, match="more than 1000 bytes"):
        process.ask({"do": "long", "n": 10**6})
    add(process)


def test_a_refusal_keeps_the_process(process: GuardedProcess) -> None:
    before = add(process)
    with pytest.raises(UserError, match=r"^three is too many$") as caught:
        process.ask({"do": "refuse"})
    assert not isinstance(caught.value, ProcessDied)
    assert add(process) == before


def test_a_defect_in_the_module_is_told_in_one_line(process: GuardedProcess) -> None:
    with pytest.raises(ProcessDied, match="it failed: KeyError: ") as caught:
        process.ask({"do": "fail"})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120
    add(process)


def test_a_process_that_ends_is_replaced(process: GuardedProcess) -> None:
    with pytest.raises(ProcessDied, match="exit code 3") as caught:
        process.ask({"do": "exit"})
    assert not isinstance(caught.value, ProcessLost)
    pid = add(process)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    with pytest.raises(ProcessLost, match="signal 9"):
        add(process)
    assert add(process) != pid


def test_questions_of_several_threads_do_not_mix(process: GuardedProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda a: add(process, a), range(100)))) == 1


def test_closing_ends_a_question_under_way(process: GuardedProcess) -> None:
    slow = GuardedProcess("made_up_answers", seconds=600, memory_bytes=64 << 20, output_bytes=1000)
    pid = add(slow)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            slow.ask({"do": "for ever"})
        except ProcessDied as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    slow.close()
    thread.join(60)
    assert [str(error) for error in errors] == ["the process is closed"]
    assert gone(pid)
    slow.close()
    with pytest.raises(ProcessDied, match="closed"):
        add(slow)


def test_it_ends_when_nobody_holds_it(process: GuardedProcess) -> None:
    dropped = GuardedProcess("made_up_answers", seconds=600, memory_bytes=64 << 20, output_bytes=1000)
    pid = add(dropped)
    del dropped
    assert gone(pid)


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_the_process_that_started_it(process: GuardedProcess, busy: bool) -> None:
    code = f"""
import os, sys, threading, time
sys.path.insert(0, {str(sys.path[0])!r})
from hotcold.processes.guarded import GuardedProcess
process = GuardedProcess("made_up_answers", seconds=2, memory_bytes=64 << 20, output_bytes=1000)
print(process.ask({{"do": "add", "a": 1, "b": 2}})["pid"], flush=True)
if {busy}:
    threading.Thread(target=process.ask, args=({{"do": "for ever"}},)).start()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if busy:
            time.sleep(0.3)  # the question is likely under way; if not, it never comes
        parent.kill()
    assert gone(pid)


def test_a_module_that_is_missing_is_told() -> None:
    process = GuardedProcess("no_such_module", seconds=1, memory_bytes=1 << 20, output_bytes=100)
    with pytest.raises(ProcessLost, match=r"of no_such_module did not start: it ended \(exit code 1\)$"):
        process.ask({})
