"""Layers: what makes a module's call one that swaps."""
