"""The outlook: what a step will take, before anything ran."""
