"""The model: its layers and packs, and the host store where their weights live."""
