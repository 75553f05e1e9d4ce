"""Microbatches: how a batch is split, what its parts may share, and what they log together."""
