"""Updates that nodes divide: they agree, step by step, on what each needs of the gradients."""

from __future__ import annotations

from itertools import chain

from lightning_harmony.engine.nodes.division import Need, parameters_of
from lightning_harmony.updating.update_policy import UpdatePolicy


def agree_on_update(policy: UpdatePolicy, *, may_wait: bool) -> None:
    """Agree with other nodes on who updates what with the gradients of the backward that begins. All nodes come here.

    Args:
        policy: of this node.
        may_wait: whether its update follows the backward in any case.
    """
    division = policy.division
    assert division is not None
    own = policy.need()
    need = division.agree(max(own, Need.OWN_AND_NORMS) if may_wait else own)
    # Where all update everything, each does so when it can.
    policy.others_defer = own is Need.OWN and own < need < Need.WHOLE
    if need is not Need.WHOLE:
        divide(policy)
    elif division.is_divided:
        policy.engine.updater.postponed.finish()
        division.gather(policy.trainer.optimizers)


def divide(policy: UpdatePolicy) -> None:
    """Give each parameter that is trained an owner, and drop optimizer state that other nodes have."""
    division, trainer = policy.division, policy.trainer
    assert division is not None
    updated = chain.from_iterable(map(parameters_of, trainer.optimizers))
    trained = {parameter for parameter in updated if parameter.requires_grad}
    if not division.is_divided:
        policy.engine.updater.postponed.finish()
    division.divide((p for p in trainer.lightning_module.parameters() if p in trained), trainer.optimizers)
