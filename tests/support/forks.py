"""Interpreters of their own for pieces of code, as forks of one that has imported what takes long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PARENT = """
import json, os, sys, time, traceback
{imports}

def start(code, environment, output):
    child = os.fork()
    if child:
        return child
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    try:
        exec(code, {{"__name__": "__main__"}})
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)

def wait(child, seconds):
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)

for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps({{"start": start, "wait": wait}}[name](*arguments)), flush=True)
os._exit(0)
"""
SECONDS = 300


class Ended(NamedTuple):
    """How a fork has ended.

    Attributes:
        exit_code: its own, or the negative number of the signal that killed it.
        said: what it wrote to stdout and stderr.
    """

    exit_code: int
    said: str


class Fork:
    """A fork that runs.

    Attributes:
        pid: its process.
    """

    def __init__(self, forks: Forks, pid: int, output: Path) -> None:
        self._forks = forks
        self.pid = pid
        self._output = output
        self._exit_code: int | None = None

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or ends within some seconds."""
        if self._exit_code is None:
            self._exit_code = self._forks.ask("wait", self.pid, seconds)
        return self._exit_code is not None

    def end(self, seconds: float = SECONDS) -> Ended:
        """Wait until it has ended."""
        has_ended, said = self.has_ended(seconds), self._output.read_text()
        assert has_ended, f"A fork runs for more than {seconds} seconds: {said}"
        assert self._exit_code is not None
        return Ended(self._exit_code, said)

    def kill(self) -> None:
        """End it, if it runs."""
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            assert self.has_ended(SECONDS)


class Forks:
    """Forks of one interpreter."""

    def __init__(self, parent: subprocess.Popen[str], folder: Path) -> None:
        self._parent = parent
        self._folder = folder
        self._num_started = 0

    def start(self, code: str, environment: Mapping[str, str] | None = None) -> Fork:
        """Start code in a fork, with some variables more in its environment."""
        output = self._folder / f"{self._num_started}.txt"
        self._num_started += 1
        output.touch()
        return Fork(self, self.ask("start", code, dict(environment or {}), str(output)), output)

    def run(self, code: str) -> Ended:
        """Run code in a fork until it ends."""
        return self.start(code).end()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Have the interpreter that forks call a function of its own."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps([name, *arguments]), file=self._parent.stdin, flush=True)
        answer = self._parent.stdout.readline()
        assert answer, "The interpreter that forks has ended."
        return json.loads(answer)


@contextmanager
def forking(imports: str, environment: Mapping[str, str]) -> Iterator[Forks]:
    """The context in which an interpreter forks.

    Args:
        imports: code that it runs first, and that starts no thread.
        environment: variables beside those of this process.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", PARENT.format(imports=imports)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent,
    ):
        yield Forks(parent, Path(folder))
        assert parent.stdin is not None
        parent.stdin.close()
