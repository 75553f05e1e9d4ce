"""A task: what one grant of the executor lets one lane do."""

import re
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Which way a lane goes through a pack."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Task:
    """The forward or backward of one pack for one microbatch.

    Prints as ``3F0``: pack 3, forward, microbatch 0; `parse` reads that back.
    """

    pack: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.pack}{self.phase.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Read a task as `str` prints it.

        Raises:
            ValueError: if ``text`` is not of the form ``<pack><F|B><microbatch>``.
        """
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a task: expected <pack><F|B><microbatch>, as in '3F0'")
        return cls(int(match[1]), Phase(match[2]), int(match[3]))
