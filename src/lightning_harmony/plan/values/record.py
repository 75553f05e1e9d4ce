"""The record: what steps of a model were seen to do on a machine, kept from one fit to the next."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from typing_extensions import override

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.document import Count, Document, DocumentKind
from lightning_harmony.plan.values.line import on_line
from lightning_harmony.plan.values.profile import DeviceLimits


@dataclass(frozen=True)
class Origin:
    """What a record is of. It tells nothing of anything else.

    Attributes:
        model: a fingerprint of the layers, their code and how they are computed with.
        machine: the device and its host.
        versions: of what computes.
    """

    model: str
    machine: str
    versions: str


@dataclass(frozen=True)
class SeenSize:
    """What layers cost with microbatches of one size, each measured in a pack of its own.

    Attributes:
        num_elements: of the largest microbatch.
        layers: the cost of each.
    """

    num_elements: Count
    layers: tuple[Cost, ...]


@dataclass(frozen=True)
class NarrowWeights:
    """The parameters of a layer that were seen to be read through autocast's cast alone.

    Attributes:
        layer: its name.
        numbers: of the parameters, in the order in which the layer has them.
    """

    layer: str
    numbers: tuple[Count, ...]


@dataclass(frozen=True)
class Record(Document):
    """What was seen.

    Attributes:
        origin: of what.
        calls: the names of the layers in the order in which a microbatch's forward calls them.
        is_cast: whether autocast was seen at work.
        narrow: what it casts.
        sizes: what layers cost, the smallest microbatches first.
        machine: how fast copies and updates were. A capacity is not part of it.
    """

    # A reader of one version refuses all others: a record is quickly made anew.
    kind = DocumentKind("lightning-harmony profile", 8, "profile", "profile")

    origin: Origin
    calls: tuple[str, ...]
    is_cast: bool
    narrow: tuple[NarrowWeights, ...]
    sizes: tuple[SeenSize, ...]
    machine: DeviceLimits

    @property
    def most_elements(self) -> int:
        """Of the largest microbatch that was seen."""
        return self.sizes[-1].num_elements

    def costs_at(self, num_elements: int) -> tuple[Cost, ...]:
        """The cost of each layer with microbatches of another size.

        Between two sizes that were seen, bytes and seconds lie on the line through both; beyond them, on the line through
        the two nearest. Where a single size was seen, what is smaller is taken to cost as much, and what is larger to cost
        more in proportion: never too little.

        Args:
            num_elements: of a microbatch.
        """
        place = bisect_left(self.sizes, num_elements, key=lambda size: size.num_elements)
        if len(self.sizes) == 1:
            factor = max(num_elements / max(self.most_elements, 1), 1.0)
            return tuple(_scaled(cost, factor) for cost in self.sizes[0].layers)
        one, other = self.sizes[(first := min(max(place - 1, 0), len(self.sizes) - 2)) : first + 2]
        factor = (num_elements - one.num_elements) / (other.num_elements - one.num_elements)
        return on_line(one.layers, other.layers, factor)

    def with_size(self, seen: SeenSize) -> "Record":
        """The record with what was seen of one more size, or anew of one that it has."""
        others = [size for size in self.sizes if size.num_elements != seen.num_elements]
        return replace(self, sizes=tuple(sorted([*others, seen], key=lambda size: size.num_elements)))

    @override
    def refuse_contradictions(self) -> None:
        """Refuse sizes that do not grow or tell of other layers, and layers whose cost is not known."""
        sizes = [size.num_elements for size in self.sizes]
        if not sizes or sizes != sorted(set(sizes)):
            raise PlanError(f"the sizes of a profile's microbatches have to grow, but are {sizes}")
        names = [cost.name for cost in self.sizes[0].layers]
        if len(set(names)) < len(names) or any([cost.name for cost in size.layers] != names for size in self.sizes):
            raise PlanError("a profile has to tell of the same layers for each size of the microbatches, of each once")
        strangers = sorted({*self.calls, *(narrow.layer for narrow in self.narrow)} - set(names))
        if strangers:
            raise PlanError(f"the profile does not say what layer {strangers[0]!r} costs")


def _scaled(cost: Cost, factor: float) -> Cost:
    """What a layer costs where all that depends on the microbatch grows by a factor."""
    nothing = Cost(
        cost.name,
        cost.weight_bytes,
        cost.gradient_bytes,
        copied_bytes=cost.copied_bytes,
        staging_bytes=cost.staging_bytes,
        master_bytes=cost.master_bytes,
        disk_bytes=cost.disk_bytes,
        optimizer_bytes=cost.optimizer_bytes,
    )
    return on_line(nothing, cost, factor)
