"""Batches: into microbatches, and the outputs of microbatches back into one."""
