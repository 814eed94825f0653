"""`kdtp chat` as people meet it: on a terminal, through a pipe, interrupted."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kdtp.__main__ import main
from kdtp.cli.answer import Answer
from kdtp.messages import Tokens
from kdtp.text import template
from kdtp.text.calls import KIMI, AnswerParser
from kdtp.text.tokenizer import load
from tests import text_folders as folders
from tests.processes import TINY, until

LONGEST = 120.0
STOPPED = r"\[stopped; (\d+) tokens, "
ENDED = r"\[(\d+) tokens, "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = folders.deepseek(tmp_path_factory.mktemp("chat"))
    shutil.copy(TINY, folder / "model.kdtr")
    return folder / "model.kdtr"


class Terminal:
    """`kdtp chat` on a pseudo-terminal of its own: as the foreground process, so that Ctrl-C is a byte."""

    def __init__(self, *flags: object) -> None:
        self.seen = ""
        command = [sys.executable, "-m", "kdtp", "chat", *map(str, flags)]
        self.pid, self.screen = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, command)

    def until(self, pattern: str, again: str = "") -> re.Match[str]:
        """Read until the screen shows `pattern`; what was read before it is forgotten. again: typed each second."""
        deadline, next_time = time.monotonic() + LONGEST, time.monotonic() + 1
        while not (found := re.search(pattern, self.seen)):
            if again and time.monotonic() > next_time:
                next_time += 1
                self.type(again)
            assert time.monotonic() < deadline and self._read(), f"{pattern!r} not in {self.seen!r}"
        self.seen = self.seen[found.end() :]
        return found

    def more(self, count: int) -> None:
        """Read until `count` characters more have come."""
        deadline = time.monotonic() + LONGEST
        while len(self.seen) < count:
            assert time.monotonic() < deadline and self._read(), self.seen

    def _read(self) -> bool:
        ready, _, _ = select.select([self.screen], [], [], 0.2)
        if ready:
            try:
                data = os.read(self.screen, 4096)
            except OSError:  # the other end is closed
                return False
            self.seen += data.decode("utf-8", "replace")
        return True

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def code(self) -> int:
        """The exit code; what is printed at the end is read."""
        deadline = time.monotonic() + LONGEST
        while True:
            alive = self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, self.seen
            if not alive:
                time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.screen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("--tp", 2, "--drafter", "ngram")], ids=["one rank", "two ranks"])
def test_on_a_terminal(model, flags):
    with Terminal("--model", model, "--threads", 1, *flags) as terminal:
        terminal.until("Ctrl-C stops an answer")
        terminal.until("> ")
        family = terminal.family()
        terminal.type("one\r")
        terminal.until("one\r?\n")
        terminal.more(60)  # it streams
        terminal.type("\x03")
        assert 0 < int(terminal.until(STOPPED).group(1)) < 490
        terminal.until("> ")

        # At the prompt it ends the line only. Between showing it and waiting for keys, readline hears no signal.
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.type("\x03")
        terminal.until("/reset begins a new conversation", again="\x03")
        terminal.until("> ")

        terminal.type("/reset\r")
        terminal.until("a new conversation\r?\n.*> ")
        terminal.type("/rest\r")
        terminal.until("/rest: no such command")
        terminal.until("> ")
        terminal.type("two\r")
        terminal.more(30)
        terminal.type("\x03")
        terminal.until(STOPPED)
        terminal.until("> ")
        if "--tp" not in flags:
            terminal.type("\x04")
            assert terminal.code() == 0
        else:
            leave_an_engine_that_hangs(terminal, family)
        assert "Traceback" not in terminal.seen
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 20)


def leave_an_engine_that_hangs(terminal: Terminal, family: list[psutil.Process]) -> None:
    """The first Ctrl-C has no effect; the second one ends the program."""
    (coordinator,) = (p for p in family if {"kdtp.engine.start", "host"} <= set(p.cmdline()))
    terminal.type("three\r")
    terminal.more(30)
    coordinator.suspend()
    terminal.type("\x03")
    time.sleep(0.5)
    terminal.type("\x03")
    assert terminal.code() == 130


@pytest.fixture
def piped(capsys, monkeypatch, model):
    """A conversation through a pipe, in this process: its lines and flags -> what is answered, and what is told."""

    def talk(lines: str, *flags: object) -> tuple[str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["chat", "--model", str(model), "--threads", "1", *map(str, flags)]) == 0
        return capsys.readouterr()

    return talk


def alone(capsys, model: Path, word: str) -> str:
    """What `kdtp generate` answers."""
    capsys.readouterr()
    assert main(["generate", "--model", str(model), word, "--max-tokens", "12", "--threads", "1"]) == 0
    return capsys.readouterr().out


@pytest.mark.timeout(300)
def test_through_a_pipe(capsys, model):
    """Answers only on stdout; the second depends on the first, and after /reset it does not."""
    command = [sys.executable, "-m", "kdtp", "chat", "--model", model, "--threads", 1, "--max-tokens", 12]
    lines = "one\ntwo\n\n/reset\ntwo\n/exit\nnever\n"
    done = subprocess.run(list(map(str, command)), input=lines, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len(re.findall(r"\[12 tokens, [\d.]+ tokens/s, 1.00 per round\]", done.stderr)) == 3
    first, second = (alone(capsys, model, word) for word in ("one", "two"))
    assert done.stdout.startswith(first) and done.stdout.endswith(second) and first + second != done.stdout
    middle = done.stdout[len(first) : -len(second)]
    assert middle.strip("\n") and middle.strip("\n") != second.strip("\n")


def test_a_conversation_that_becomes_too_long(model, piped):
    _, told = piped("x" * 3000 + "\nshort\n" + "y" * 3000 + "\n", "--max-tokens", 5, "--drafter", "ngram")
    lines = told.splitlines()
    room = "there is room for 512; /reset begins a new one"
    assert [room in line or line.startswith("[5 tokens") for line in lines[-3:]] == [True] * 3
    # One without --max-tokens uses what is left, and not more.
    _, told = piped("x" * 400 + "\n")
    count = int(re.search(ENDED, told).group(1))
    tokenizer = load(model.parent)
    chat = template.load(tokenizer)
    prompt = tokenizer.encode_parts(chat.render([{"role": "user", "content": "x" * 400}]))
    assert 0 < count <= 512 - len(prompt)


def test_stop_strings(piped):
    whole, _ = piped("one\n", "--max-tokens", 40)
    stop = whole[20:23]
    assert piped("one\n", "--max-tokens", 40, "--stop", stop)[0] == whole[: whole.index(stop)] + "\n"


CALL = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "thinking", "turn"),
    [
        ("an answer", False, {"content": "an answer"}),
        ("<think>hm</think>yes", False, {"content": "yes", "reasoning_content": "hm"}),
        ("hm</think>yes", True, {"content": "yes", "reasoning_content": "hm"}),
        ("cut off", True, {"content": "", "reasoning_content": "cut off"}),
        ("look" + CALL, False, {"content": "look", "tool_calls": [
            {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}),
    ],
)  # fmt: skip
def test_an_answer_as_a_turn(tmp_path, text, thinking, turn):
    tokenizer = load(folders.kimi(tmp_path))
    shown: list[str] = []
    answer = Answer(tokenizer, (), (), shown.append, AnswerParser(tokenizer, KIMI, thinking))
    answer.take(Tokens(1, 0, tuple(tokenizer.encode_parts(tokenizer.split(text)))))
    answer.end()
    assert answer.message() == {"role": "assistant"} | turn
    assert "".join(shown) == answer.text == tokenizer.decode(tokenizer.encode_parts(tokenizer.split(text)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drafter", "oracle"], "drafter = 'oracle': knows only the model file's own prompt"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--stop", ""], "stop[0] = ''"),
        (["--template-set", "x=1"], "x: the chat template reads no such variable"),
        (["--tokenizer", "/nonexistent"], "no tokenizer; looked for"),
    ],
)
def test_refusals(capsys, model, flags, words):
    assert main(["chat", "--model", str(model), *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error, error


def test_a_model_without_a_chat_template(capsys, tmp_path):
    folder = folders.deepseek(tmp_path, chat_template=None)
    assert main(["chat", "--model", str(TINY), "--tokenizer", str(folder)]) == 2
    assert "no chat template; `kdtp generate` continues a text without one" in capsys.readouterr().err
