"""Searching: which plan to run by."""
