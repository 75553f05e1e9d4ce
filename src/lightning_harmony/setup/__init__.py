"""Setting up: what users choose, what is refused, and what is registered."""
