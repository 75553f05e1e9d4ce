"""Interpreters of their own for pieces of code, as forks of one that has imported what takes long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

PARENT = """
import json, os, sys, traceback
{imports}
for line in sys.stdin:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writes, 2)
        try:
            exec(json.loads(line), {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stderr.flush()
        os._exit(0)
    os.close(writes)
    with open(reads) as said:
        text = said.read()
    print(json.dumps([os.waitpid(child, 0)[1], text]), flush=True)
os._exit(0)
"""


class Ended(NamedTuple):
    """How a fork has ended.

    Attributes:
        exit_code: its own, or the negative number of the signal that killed it.
        said: what it wrote to stderr.
    """

    exit_code: int
    said: str


class Forks:
    """Forks of one interpreter."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def run(self, code: str) -> Ended:
        """Run code in a fork until it ends."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps(code), file=self._parent.stdin, flush=True)
        answer = self._parent.stdout.readline()
        assert answer, "The interpreter that forks has ended."
        status, said = json.loads(answer)
        return Ended(os.waitstatus_to_exitcode(status), said)


@contextmanager
def forking(imports: str, environment: Mapping[str, str]) -> Iterator[Forks]:
    """The context in which an interpreter forks.

    Args:
        imports: code that it runs first, and that starts no thread.
        environment: variables beside those of this process.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(imports=imports)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        yield Forks(parent)
        assert parent.stdin is not None
        parent.stdin.close()
