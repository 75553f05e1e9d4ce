"""Estimating: what a training will take, before any memory is taken."""
