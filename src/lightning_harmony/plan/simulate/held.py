"""What a device holds beside weights, as its tasks are put in order."""

from dataclasses import dataclass, field


@dataclass
class Held:
    """What a device holds beside weights, in the order of its tasks.

    What is on its way out counts as gone.

    Attributes:
        num_bytes: now.
        most_bytes: at most, since the stay before.
        leaving_bytes: what is on its way out since then.
        sum_bytes: what of it is sums of gradients, or waits for an update with these.
        most_passing_bytes: at most of all else.
        sums: those that there are, by pack and visit.
        outputs: by microbatch, what it has here.
    """

    num_bytes: int = 0
    most_bytes: int = 0
    leaving_bytes: int = 0
    sum_bytes: int = 0
    most_passing_bytes: int = 0
    sums: set[tuple[int, int]] = field(default_factory=set)
    outputs: dict[int, int] = field(default_factory=dict)

    def take(self, num_bytes: int, left_bytes: int) -> None:
        """Something takes bytes, and leaves some of them."""
        self.most_bytes = max(self.most_bytes, self.num_bytes + num_bytes)
        self.most_passing_bytes = max(self.most_passing_bytes, self.num_bytes + num_bytes - self.sum_bytes)
        self.num_bytes += left_bytes
