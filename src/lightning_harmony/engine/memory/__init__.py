"""Memory: where weights, gradients and the stash are, and how they move."""
