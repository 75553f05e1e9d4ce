"""The fewest microbatches of a batch that fit in a device's memory: found by running them, and from what they took."""

from __future__ import annotations


class Fewest:
    """Says how many microbatches to try: twice as many until they fit, then as few as should fit by what those took.

    Args:
        number: of microbatches that are tried first.
        most: of them that there can be.
        samples: of the batch.
        lasting_bytes: what the device holds whatever their number.
        capacity: bytes that a step may take.

    Attributes:
        number: to try next.
    """

    def __init__(self, number: int, most: int, samples: int, lasting_bytes: int, capacity: int) -> None:
        self.number = number
        self._most, self._samples = most, samples
        self._lasting_bytes, self._capacity = lasting_bytes, capacity
        # That does not fit; and that does.
        self._too_few, self._enough = 0, most + 1

    def fails(self) -> bool:
        """So many do not fit; whether there is another number to try."""
        self._too_few = self.number
        if self._enough <= self._most:
            self.number += 1
        elif self.number >= self._most:
            return False
        else:
            self.number = min(2 * self.number, self._most)
        return True

    def fits(self, num_bytes: int) -> bool:
        """So many fit; whether to stay with that, and not to try fewer.

        Args:
            num_bytes: what they took at most.
        """
        if self._enough <= self._most:
            return True
        self._enough = self.number
        of_sample = max(num_bytes - self._lasting_bytes, 0) / self._largest(self.number)
        # Fewer than twice as many may do, if those that fit are not one more than those that do not.
        for fewer in range(self._too_few + 1, self.number):
            if self._lasting_bytes + of_sample * self._largest(fewer) <= self._capacity:
                self.number = fewer
                return False
        return True

    def _largest(self, number: int) -> int:
        """Samples of the largest of some microbatches."""
        return -(-self._samples // number)
