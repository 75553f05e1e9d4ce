"""Errors, named by whose fault they are."""


class UnsupportedModelError(ValueError):
    """The model does something that cannot be trained exactly while its weights are swapped."""


class BorrowsModuleError(UnsupportedModelError):
    """The code of a layer uses a module that is no part of it.

    Args:
        message: says so.
        borrower: the name of the layer.
        lender: the module that it calls, or the name of the one whose parameter it reads.
    """

    def __init__(self, message: str, borrower: str, lender: object) -> None:
        super().__init__(message)
        self.borrower, self.lender = borrower, lender


class UnswappableBufferError(UnsupportedModelError):
    """A buffer of a layer may not be swapped with it.

    Args:
        does: what is done to the buffer.
        why: what would be wrong.
        owner: the module that has the buffer.
        buffer: the name of the buffer.
    """

    def __init__(self, does: str, why: str, owner: object, buffer: str) -> None:
        super().__init__(
            f"{does}, but the buffer is swapped with its layer, and {why}, or do so from the first step on"
        )
        self.does, self.owner, self.buffer = does, owner, buffer


class CapacityError(RuntimeError):
    """The machine is too small: the message says by how many bytes, for which layer, and what to change."""


class PlanError(RuntimeError):
    """A plan breaks the rules, or is for another model or machine: the message marks the culprit or names the difference."""
