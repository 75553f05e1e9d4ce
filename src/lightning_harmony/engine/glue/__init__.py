"""Glue: the user's code between layers, to which all devices are one."""
