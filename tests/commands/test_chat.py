"""`hotcold chat`: in a terminal, and with piped input."""

from __future__ import annotations

import builtins
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chat_models, waiting_chat

from hotcold import LLM
from hotcold.chat.chat import Part
from hotcold.commands.chat import _talk
from hotcold.commands.chat_commands import completions
from hotcold.commands.chat_terminal import Printer
from hotcold.commands.cli import main
from hotcold.commands.display import PlainDisplay
from hotcold.commands.interrupts import Interrupts
from hotcold.commands.line_input import LineInput

COMMAND = [sys.executable, "-m", "hotcold", "chat"]
#: Its answers stop in the middle until a test ends or continues them.
WAITING = [sys.executable, str(Path(waiting_chat.__file__)), "chat", "--logit-bias", "2-inf"]
FOX = "Once upon a time there was a fox"


def talk(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *lines: str,
    args: tuple[str, ...] = (),
    code: int = 0,
) -> tuple[str, str]:
    """Returns what piped lines bring about, on stdout and on stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", "-s", "1", "-n", "12", *args]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.fixture(scope="module")
def answers() -> Iterator[Any]:
    """Answers some messages as the Python interface does."""
    with LLM() as llm:

        def found(*texts: str, **options: Any) -> str:
            messages: list[dict[str, Any]] = []
            for text in texts:
                messages.append({"role": "user", "content": text})
                answer = llm.chat(messages, **{"seed": 1, "max_tokens": 12, **options})
                messages.append(answer.message)
            return answer.text

        yield found


def test_piped_lines_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any
) -> None:
    out, err = talk(monkeypatch, capsys, FOX, "", "A bear came.")
    assert out == f"{answers(FOX).lstrip()}\n{answers(FOX, 'A bear came.').lstrip()}\n"
    assert err.count("12 tokens, ") == 2 and err.count("no chat template") == 1
    assert all(len(line) < 200 for line in err.splitlines())


def test_several_lines_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any
) -> None:
    expected = answers("One\ntwo\nthree").lstrip() + "\n"
    assert talk(monkeypatch, capsys, "One\\", "two\\", "three")[0] == expected
    assert talk(monkeypatch, capsys, '"""One', "two", 'three"""', "/undo")[0] == expected
    assert talk(monkeypatch, capsys, '"""', "One", "two", "three", '"""')[0] == expected
    assert talk(monkeypatch, capsys, '"""One', "two", "three")[0] == expected  # at the end of the input
    assert talk(monkeypatch, capsys, '"""One\\', '/help"""')[0] == answers("One\\\n/help").lstrip() + "\n"


def test_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, tmp_path: Path
) -> None:
    first = answers(FOX).lstrip() + "\n"
    out, _ = talk(monkeypatch, capsys, FOX, "/retry", "/undo", FOX, "/clear", FOX, "/quit", FOX)
    assert out == first * 4
    out, err = talk(monkeypatch, capsys, FOX, "A bear came.", "/undo", "A bear came.", "/stats")
    assert out == first + (answers(FOX, "A bear came.").lstrip() + "\n") * 2
    assert re.search(r"\d+ of 256 tokens of the context", err) and "taken back: A bear came." in err
    out, _ = talk(monkeypatch, capsys, FOX, "/more")
    with LLM() as llm:
        more = llm.generate(FOX + answers(FOX), seed=1, max_tokens=12).text
    assert out == first + more.removesuffix("\n") + "\n"
    ended = talk(monkeypatch, capsys, FOX, "/more", args=("-l", "2+40"), code=2)[1]  # ends at once
    assert "the last answer is complete: write a message" in ended
    out, err = talk(monkeypatch, capsys, "/set n 5", "/set temp 0", FOX, "/set", "/set seed 3")
    assert out == answers(FOX, max_tokens=5, temperature=0.0).lstrip() + "\n"
    assert re.search(r"^temp +0.0$", err, re.MULTILINE) and re.search(r"^n +5$", err, re.MULTILINE)
    out, err = talk(
        monkeypatch, capsys, "/system Once upon a time", "there was a fox", "/system -", "/system"
    )
    assert out == answers("Once upon a time\n\nthere was a fox").lstrip() + "\n"
    assert "system: Once upon a time\n" in err and "there is no system message" in err


def test_a_conversation_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, tmp_path: Path
) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    talk(monkeypatch, capsys, FOX, f"/save {file}", f"/save {file}")
    saved = json.loads(file.read_text("utf-8"))
    assert [message["content"] for message in saved["messages"]] == [FOX, answers(FOX)]
    second = answers(FOX, "A bear came.").lstrip() + "\n"
    assert talk(monkeypatch, capsys, f"/load {file}", "A bear came.", f"/save {file}")[0] == second
    assert len(json.loads(file.read_text("utf-8"))["messages"]) == 4
    args = ("--load", str(file))
    assert talk(monkeypatch, capsys, "/undo", "A bear came.", args=args)[0] == second
    other.write_text('{"messages": [{"role": "hacker", "content": ""}]}')
    for line, error in (
        (f"/save {other}", "other.json exists already"),
        (f"/load {other}", "is not a conversation: messages[0].role is 'hacker'"),
        (f"/load {tmp_path}", "is not a file"),
        (f"/load {Path(__file__)}", "is not a conversation"),
        ("/load", "name a file"),
        (f"/save {tmp_path / 'missing' / 'x'}", "cannot be"),
        ("/save ~nobody-of-this-name/x", "~nobody-of-this-name is not a user of this machine"),
        ("/load ~nobody-of-this-name/x", "~nobody-of-this-name is not a user of this machine"),
    ):
        assert error in talk(monkeypatch, capsys, line, code=2)[1], line


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/hlep", "there is no command /hlep; did you mean /help?"),
        ("/xyz 5", "there is no command /xyz: /help lists the commands"),
        ("/undo", "there is no message to take back"),
        ("/retry", "there is no message to answer yet"),
        ("/more", "there is no answer to continue"),
        ("/set n 0", "n is 0: allowed are"),
        ("/set n x", "n is 'x': a whole number is needed"),
        ("/set temp -1", "temperature"),
        ("/set temp nan", "temp is 'nan': a number is needed"),
        ("/set top-k 1.5", "top-k is '1.5': a whole number is needed"),
        (f"/set n 1{'0' * 400}", f"n is 1{'0' * 39}: allowed are"),
        ("/set colour red", "there is no setting 'colour': allowed are temp, "),
        ("fox " * 400, "the last message needs"),
    ],
)
def test_piped_input_ends_at_what_cannot_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, line: str, error: str
) -> None:
    """The lines that follow were written for an answer that there is not; the exit code tells the
    pipe's user."""
    out, err = talk(monkeypatch, capsys, FOX, "/clear", line, FOX, code=2)
    assert f"hotcold: error: {error}" in err and out == answers(FOX).lstrip() + "\n"
    assert err.count("error: ") == 1


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_pipe_without_a_message_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...]
) -> None:
    out, err = talk(monkeypatch, capsys, *lines, code=2)
    error = "standard input has no message: write one a line, or chat in a terminal"
    assert out == "" and f"hotcold: error: {error}\n" in err


def test_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They end a pipe, and not a talk in a terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"K\xe4se\n"), encoding="utf-8"))
    assert main(["chat"]) == 2
    message = "error: standard input is not UTF-8 text: it has the byte 0xe4"
    assert f"hotcold: {message}" in capsys.readouterr().err
    lines = LineInput(Interrupts())
    lines.interactive = True
    typed = iter([b"K\xe4se", b"/quit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(typed).decode())
    assert _talk(None, lines) == 0  # type: ignore[arg-type]  # it is not asked
    assert message in capsys.readouterr().err


def test_commands_and_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks").mkdir()
    for name in ("talks/one.json", "talks/other.json", "tale.json"):
        (tmp_path / name).write_text("[]")
    assert completions("/s") == ["/system", "/save", "/set", "/stats"] and completions("/q") == ["/quit"]
    assert completions("/load ta") == ["tale.json", "talks/"]
    assert completions("/save talks/o") == ["talks/one.json", "talks/other.json"]
    assert completions(f"/load {tmp_path}/tale") == [f"{tmp_path}/tale.json"]
    assert completions("/load none/x") == completions("/set te") == completions("/x") == []


def test_what_cannot_be_done_in_a_terminal_is_said_and_the_talk_goes_on() -> None:
    with PseudoTerminal([*COMMAND, "-s", "1", "-n", "4"]) as terminal:
        terminal.wait_for("> ")
        terminal.send("/hlep\n")
        terminal.wait_for("error: there is no command /hlep")
        terminal.send("/und\t\n")
        terminal.wait_for("error: there is no message to take back")
        terminal.send("/retry now\n")
        terminal.wait_for("error: /retry takes no argument: leave out 'now'")
        terminal.send("/quit\n")
        assert terminal.end() == 0


def test_a_full_context_forgets_the_beginning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Once upon a time", *(["Then a fox came, and a bear, and they went into the wood. " * 2] * 5)]
    out, err = talk(monkeypatch, capsys, *lines, "/stats", args=("-n", "40"))
    assert len(re.findall("^40 tokens, ", err, re.MULTILINE)) == 6 and "error" not in err
    assert err.count("generation 40 tokens") == 1  # of /stats
    assert re.search(r"the first [24] messages no longer fit", err)
    assert out.count("\n") >= 6


def test_the_second_turn_reads_only_what_is_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = talk(monkeypatch, capsys, FOX, "A bear came.", "/retry", args=("-n", "64", "--verbose"))
    assert re.findall(r"prompt \d+ tokens \((\d+) reused\)", err) == ["64", "64"]


def test_help_fits_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = talk(monkeypatch, capsys, "/help")
    lines = err.splitlines()
    assert len(lines) > 10 and all(len(line) <= 80 for line in lines if not line.startswith("note"))
    for name in ("help", "clear", "undo", "retry", "system", "save", "load", "set", "stats", "quit"):
        assert f"/{name}" in err


def test_a_wrong_folder_for_the_history(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["chat", "--history", str(tmp_path / "missing" / "h")]) == 2
    assert "a file in an existing folder is needed" in capsys.readouterr().err


def test_the_models_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    template = (
        "{% if messages[-1].content == 'No' %}{{ raise_exception('I refuse') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if mood is defined %}He was {{ mood }}.{% endif %}Once"
    )
    model = chat_models.templated(tmp_path / "model.gguf", template)
    given = ("-m", str(model))
    lines = ["/set mood sad", "Hello", "/set mood [1", "/set"]
    out, err = talk(monkeypatch, capsys, *lines, args=given)
    with LLM(model) as llm:
        prompt = "user: Hello\nHe was sad.Once"
        assert out.strip() == llm.generate(prompt, seed=1, max_tokens=12).text.strip()
    assert "no chat template" not in err and re.search(r"^mood +\[1$", err, re.MULTILINE)
    for line, error in (
        ("No", "cannot be rendered: I refuse"),
        ("/set bos_token x", "no setting 'bos_token'"),
    ):
        assert error in talk(monkeypatch, capsys, line, "Hello", args=given, code=2)[1]


def test_thinking_is_kept_and_not_piped(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        Part("reasoning", "Hm"),
        Part("reasoning", ".\n"),
        Part("content", "\nYes"),
        Part("content", " !"),
    ]
    printer = Printer(PlainDisplay())
    printer.show(parts)
    printer.end()
    assert capsys.readouterr().out == "Yes !\n"
    assert (printer.reasoning, printer.content) == ("Hm.\n", "\nYes !")


# --- in a terminal ----------------------------------------------------------------------------------------

if sys.platform != "win32":
    from support.terminal import PseudoTerminal

terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


def shown(answer: str) -> str:
    """An answer without Markdown, as the lines of a terminal that wraps at words are when they are joined."""
    return " ".join(answer.split())


@terminal
def test_a_conversation_in_a_terminal(answers: Any, tmp_path: Path) -> None:
    history = tmp_path / "history"
    command = [*COMMAND, "-s", "1", "-n", "12", "--history", str(history)]
    with PseudoTerminal(command) as screen:
        hello = screen.wait_for("\n> ")
        assert "/help lists commands" in hello and "sparsity exact, context of 256 tokens" in hello
        screen.send(f"Twice\x15{FOX}!\x7f\n")  # Ctrl-U and Backspace edit
        screen.wait_for("12 tokens")
        assert shown(answers(FOX)) in " ".join(screen.lines)
        screen.wait_for("\n> ")
        screen.send("A bear\\\n")
        screen.wait_for(r"\n\. ")
        screen.send("came.\n")
        expected = answers(FOX, "A bear\ncame.")
        screen.wait_for("12 tokens")
        assert shown(expected) in " ".join(screen.lines)
        screen.wait_for("\n> ")
        screen.send("\x04")
        assert screen.end() == 0
        assert max(map(len, screen.lines)) <= 80
    assert FOX in history.read_text() and "came." in history.read_text()
    with PseudoTerminal(command) as screen:
        screen.wait_for("\n> ")
        screen.send("\x1b[A\x1b[A\x1b[A\n")  # three lines up
        screen.wait_for("12 tokens")
        assert shown(answers(FOX)) in " ".join(screen.lines)
        screen.wait_for("\n> ")
        screen.send("/quit\n")
        assert screen.end() == 0


@terminal
def test_ctrl_c_ends_an_answer_and_not_the_program() -> None:
    with PseudoTerminal([*WAITING, "-n", "200"]) as screen:
        screen.wait_for("\n> ")
        for line in (FOX, "/retry"):
            screen.send(f"{line}\n")
            screen.wait_for(f"{line}\n")
            screen.wait_for(r"\w+ \w+ ")
            screen.send("\x03")
            screen.wait_for("interrupted")
            screen.wait_for("\n> ")
        screen.send("/undo\n")
        screen.wait_for("taken back: Once")
        screen.wait_for("\n> ")
        screen.send("\x04")
        assert screen.end() == 0


@terminal
def test_ctrl_c_at_the_prompt() -> None:
    """Right after the prompt was shown, again and again: none is lost, and only two in a row end."""
    with PseudoTerminal([*COMMAND, "-n", "1", "--no-figures"]) as screen:
        screen.wait_for("\n> ")
        for _ in range(10):
            screen.process.send_signal(signal.SIGINT)
            screen.wait_for("Ctrl-C again.*\n> ")
            screen.send("/system\n")
            screen.wait_for("no system message\n+> ")
        screen.send("some words")
        screen.wait_for("some words")
        screen.send("\x03")
        assert "Ctrl-C again" not in screen.wait_for("\n> ")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("Ctrl-C again.*\n> ")
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 0


@terminal
def test_pasted_lines_are_one_message(answers: Any) -> None:
    with PseudoTerminal([*COMMAND, "-s", "1", "-n", "12"]) as screen:
        screen.wait_for("\n> ")
        screen.send("\x1b[200~One\ntwo\nthree\x1b[201~\n")
        screen.wait_for("12 tokens")
        assert shown(answers("One\ntwo\nthree")) in " ".join(screen.lines)
        screen.wait_for("\n> ")
        screen.send("\x04")
        assert screen.end() == 0


@terminal
def test_ctrl_c_amid_an_answer_to_piped_input_ends_it() -> None:
    """The rest of the pipe is not meant for an answer that was cut off."""
    with subprocess.Popen([*WAITING, "-n", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{FOX}\n{FOX}\n".encode())
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@terminal
def test_what_is_typed_during_an_answer_comes_after_it(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    environment = {"NO_COLOR": "", "WAITING_FOR": str(go_on)}
    with PseudoTerminal([*WAITING, "-n", "60"], env=environment) as screen:
        screen.wait_for("\n> ")
        screen.wait_for_raw("\x1b[2m> \x1b[0m")
        screen.send(f"{FOX}\n")
        screen.wait_for(f"{FOX}\n")
        screen.wait_for(r"\w+ \w+ ")
        screen.send("xyzzy")
        go_on.touch()
        assert "xyzzy" not in screen.wait_for("60 tokens[^>]*> ")
        screen.wait_for("xyzzy")
        assert screen.lines[-1] == "> xyzzy" and "\x1b[2m60 tokens" in screen.raw
        screen.send("\x15\x04")
        assert screen.end() == 0


@terminal
@pytest.mark.parametrize("verb", ["chat", "generate"])
def test_plain_on_a_terminal_is_what_a_pipe_gets(verb: str) -> None:
    options = ["-s", "1", "-n", "60", *(["-p", FOX] if verb == "generate" else [])]
    command = [sys.executable, "-m", "hotcold", verb, *options]
    piped = subprocess.run(command, input=f"{FOX}\n", capture_output=True, text=True, check=True).stdout
    with PseudoTerminal([*command, "--plain"]) as screen:
        if verb == "chat":
            screen.wait_for("\n> ")
            screen.send(f"{FOX}\n")
            screen.wait_for(f"{FOX}\n")
            screen.wait_for("60 tokens[^>]*> ")
            screen.send("\x04")
        assert screen.end() == 0
        assert piped.replace("\n", "\r\n") in screen.raw and "\x1b[2m" not in screen.raw
    if verb == "generate":
        with PseudoTerminal(command) as screen:
            assert screen.end() == 0
            lines = screen.lines
        assert " ".join(piped.split()) in " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= 80 and any(len(line) > 60 for line in lines)
