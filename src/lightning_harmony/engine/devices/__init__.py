"""Devices: what a GPU and a virtual device can do, their streams, and the memory of the host beside them."""
