"""The gradient of a batch's loss: it is predicted, so that each microbatch's backward can follow its forward at once."""

from __future__ import annotations

from typing import Any

from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.update_policy import UpdatePolicy


class LossGradient:
    """Tells which gradient Lightning will bring to the loss of a batch.

    Args:
        tree: of Lightning.
        trainer: Lightning's.
        policy: knows the scaler, and what optimizers have.
    """

    def __init__(self, tree: LightningTree, trainer: Any, policy: UpdatePolicy) -> None:
        self._tree, self._trainer, self._policy = tree, trainer, policy

    def predicted(self) -> float | None:
        """The gradient that Lightning will bring to the sum over all batches of a step.

        None where it adds to earlier gradients, where gradients come to tensors that are none of the module's, for Lightning
        zeroes those when it knows the loss, or where the user's own `backward` may bring any other, or ask for some
        parameters: to rescale what was computed from a wrong prediction would round otherwise.
        """
        # In the first batches of a step there is nothing to add to.
        adds = self._trainer.accumulate_grad_batches > 1 and any(
            p.grad is not None for p in self._trainer.lightning_module.parameters()
        )
        return None if adds or self.is_backward_own() or self._policy.trains_others() else self.scale()

    def scale(self) -> float:
        """What Lightning's scaler multiplies losses by; 1 where there is none."""
        scaler = self._policy.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def is_backward_own(self) -> bool:
        """Whether the user's own code calls the backward."""
        plugin, base = type(self._trainer.precision_plugin), self._tree.part("plugins.precision").Precision
        return self._tree.overrides(self._trainer.lightning_module, "backward") or plugin.backward is not base.backward
