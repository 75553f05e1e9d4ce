"""Updates: from gradients to weights."""
