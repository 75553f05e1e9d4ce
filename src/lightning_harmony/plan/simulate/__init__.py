"""Simulating: when a plan's tasks run, what is where meanwhile, and whether it is valid."""
