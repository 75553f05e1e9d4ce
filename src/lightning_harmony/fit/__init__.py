"""A fit: how Lightning's steps run, in memory or swapped."""
