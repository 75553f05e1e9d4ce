"""Doing: lanes, interception, swapping and updates. torch, no Lightning."""
