"""Deciding: what runs where and when. Pure Python, no torch and no Lightning."""
