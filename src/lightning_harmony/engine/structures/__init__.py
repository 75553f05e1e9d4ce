"""Structures of Python and tensors: what a value holds, taken apart and put together again."""
