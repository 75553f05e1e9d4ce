"""Reporting: what a fit and its steps did, in words and pictures."""
