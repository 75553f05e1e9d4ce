"""Nodes: what several machines tell each other, and the mean of their gradients."""
