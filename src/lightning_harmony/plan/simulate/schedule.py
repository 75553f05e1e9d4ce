"""The schedule: the tasks of each device, in order. It prints as a grid."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lightning_harmony.plan.values.task import Task

WIDTH = 120
# Where some tasks are marked, only so many before and behind them are shown.
AROUND = 8


@dataclass(frozen=True)
class Schedule:
    """Which tasks each device does, in which order.

    A device has a stream for each kind of work, and these run beside each other: order holds within a stream, and where one
    task needs what another makes.

    Attributes:
        devices: the tasks of each.
        lasting_bytes: what weights and sums of gradients may take together on each without taking the memory of what passes;
            None for no limit.
    """

    devices: tuple[tuple[Task, ...], ...]
    lasting_bytes: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return self.grid()

    def grid(self, marked: Collection[tuple[int, int]] = ()) -> str:
        """A line for each device and a column for each place in its order, broken into blocks where they are too long.

        Args:
            marked: device and place of what to point at. Only what is around them is shown then.
        """
        places = range(max((len(tasks) for tasks in self.devices), default=0))
        if marked:
            near = {place + by for _, place in marked for by in range(-AROUND, AROUND + 1)}
            # A mark behind the last task is where one is missing.
            places = range(max(min(near), 0), min(max(near) + 1, max(len(places), *(place + 1 for _, place in marked))))
        return "\n\n".join("\n".join(block) for block in self._blocks(list(places), marked))

    def _blocks(self, places: list[int], marked: Collection[tuple[int, int]]) -> Iterator[list[str]]:
        digits = len(str(len(self.devices) - 1))
        names = [f"device {device:<{digits}} |" for device in range(len(self.devices))]
        lines = list(names)
        for place in places:
            cells = [self._cell(device, place, (device, place) in marked) for device in range(len(self.devices))]
            width = max(map(len, cells))
            if lines != names and len(lines[0]) + 1 + width > WIDTH:
                yield [line.rstrip() for line in lines]
                lines = list(names)
            lines = [f"{line} {cell:<{width}}" for line, cell in zip(lines, cells, strict=True)]
        yield [line.rstrip() for line in lines]

    def _cell(self, device: int, place: int, is_marked: bool) -> str:
        tasks = self.devices[device]
        text = str(tasks[place]) if place < len(tasks) else "." if not is_marked else "end"
        return f">{text}<" if is_marked else text
