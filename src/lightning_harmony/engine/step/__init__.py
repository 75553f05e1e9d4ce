"""The step: who runs when, from the first turn to the last update."""
