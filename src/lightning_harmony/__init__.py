"""Train PyTorch Lightning modules that do not fit in device memory, as if they did."""
