"""Errors, named by whose fault they are."""


class UnsupportedModelError(ValueError):
    """The model does something that cannot be trained exactly while its weights are swapped."""


class CapacityError(RuntimeError):
    """The machine is too small: the message says by how many bytes, for which layer, and what to change."""


class PlanError(RuntimeError):
    """A plan breaks the rules, or is for another model or machine: the message marks the culprit or names the difference."""
