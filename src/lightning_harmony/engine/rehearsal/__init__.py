"""The rehearsal: a step on fake tensors, which tells what it would take."""
