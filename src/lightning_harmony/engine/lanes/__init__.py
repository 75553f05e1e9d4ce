"""Lanes: microbatches that take turns, and what each of them must find again as it left it."""
