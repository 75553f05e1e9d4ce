"""Updating: when parameters are updated, who may look meanwhile, and what the host has room for."""
