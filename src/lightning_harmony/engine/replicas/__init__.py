"""Replicas: a model that fits on several devices, and runs on all of them."""
