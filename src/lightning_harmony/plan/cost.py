"""What a layer costs: the bytes that deciding needs, counted by the engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """Bytes of one layer on a device.

    Attributes:
        name: qualified name of the layer in the model.
        weight_bytes: parameters and buffers, as they are swapped in.
        gradient_bytes: the accumulator of its trainable parameters.
        forward_work_bytes: most that its forward, with the glue behind it, allocates for one microbatch.
        backward_work_bytes: the same of recompute and backward.
    """

    name: str
    weight_bytes: int
    gradient_bytes: int
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
