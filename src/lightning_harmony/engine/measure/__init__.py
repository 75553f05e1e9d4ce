"""Measuring: what steps, copies and layers were seen to take."""
