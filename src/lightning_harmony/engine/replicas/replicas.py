"""Replicas: microbatches of a model that fits run on all devices, in order, and with the same bits as on one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import OnCudaStream, current_cuda_stream
from lightning_harmony.engine.replicas.flat_pieces import FlatPieces
from lightning_harmony.engine.replicas.replica import Replica
from lightning_harmony.engine.replicas.runs import Runs
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.nested import map_tensors
from lightning_harmony.errors import UnsupportedModelError

# So many tensors are looked at behind each step, in turn: whether their copies are still the same.
_LOOKED_AT = 8


class Replicas(Runs):
    """Runs the microbatches of a step on several devices, of which the first has the model itself.

    The host launches them in order, and each reads what those before have left. Their gradients are added up on the first
    device, in that order, beside what devices compute.

    Args:
        module: the model, on the first device.
        devices: all of them.
        changing: the tensors that steps change in place, by their identities.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], changing: dict[int, Tensor]) -> None:
        self._devices, self._changing = list(devices), changing
        self._replicas = [Replica(module, devices[0], device, changing) for device in devices[1:]]
        # Streams of each device for what goes on beside what it computes.
        self._beside = [torch.cuda.Stream(device) if device.type == "cuda" else None for device in devices]
        # Of microbatches, the oldest first: where they ran, and the gradients of the model's own tensors.
        self._pending: deque[tuple[int, list[tuple[Tensor, Tensor]]]] = deque()
        self._sums: dict[Tensor, Tensor | None] | None = None
        # How gradients lie that go to the first device, by what they are like.
        self._pieces: dict[Any, FlatPieces] = {}
        # Whether copies have stayed the same, by what they are of, as devices will tell.
        self._num_looks = 0
        self._looked_at: list[tuple[Tensor, Tensor]] = []
        self._looks: deque[tuple[torch.cuda.Event | None, Tensor]] = deque()

    def prepare(self) -> None:
        """Bring all tensors to all devices: others may have changed them since the last step.

        Raises:
            NotReplicableError: if the model's code has to run where its tensors are.
            UnsupportedModelError: if a step has changed what no step before had changed.
        """
        self._check_looks(wait=False)
        for replica in self._replicas:
            with self._sending(0):
                replica.refresh()
        self._look()

    @contextmanager
    def step(self, parts: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The context of the step, which gives its microbatches, each on the device that it runs on."""
        try:
            yield [self._moved(part, self._place(number)) for number, part in enumerate(parts)]
        finally:
            while self._pending:
                self._add_oldest()
            for tensor, total in (self._sums or {}).items():
                tensor.grad = total
            self._sums = None
            self._join()
        self._look_again()

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """The context of a microbatch's forward; behind it, what it has changed is where the next one runs."""
        place, following = self._place(number), self._place(number + 1)
        with self._at(place, carries=True):
            yield
        if following > 0:
            with self._sending(0):
                self._replicas[following - 1].bring()

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """The context of its backward, behind which its gradients are taken to be added up."""
        place = self._place(number)
        if self._sums is None:
            # Behind the first forward: by now Lightning would have zeroed what it zeroes.
            trained = [each for each, _ in self._replicas[0].pairs() if each.requires_grad and each.is_leaf]
            self._sums = {tensor: tensor.grad for tensor in trained}
            for tensor in self._sums:
                tensor.grad = None
        with self._at(place, carries=False):
            yield
            made = [(tensor, tensor.grad) for tensor in self._sums if tensor.grad is not None]
            for tensor in self._sums:
                tensor.grad = None
        self._pending.append((place, made))
        if len(self._pending) == len(self._devices):
            self._add_oldest()

    def end(self) -> None:
        """The fit is over.

        Raises:
            UnsupportedModelError: if a step has changed what no step before had changed.
        """
        self._check_looks(wait=True)

    # ---- where ---------------------------------------------------------------------------------------------------------

    def _place(self, number: int) -> int:
        return number % len(self._devices)

    @contextmanager
    def _at(self, place: int, *, carries: bool) -> Iterator[None]:
        device = self._devices[place]
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if place > 0:
                stack.enter_context(self._replicas[place - 1].entered(carries=carries))
            yield

    @contextmanager
    def _sending(self, *places: int) -> Iterator[None]:
        """The context of copies beside what devices compute, behind what the last one of them has launched so far.

        Torch makes a copy on the current stream of the device that it comes from, as a barrier between that and the current
        one of the other device.
        """
        with ExitStack() as stack:
            for place in places:
                beside = self._beside[place]
                if beside is not None:
                    beside.wait_stream(current_cuda_stream(self._devices[places[-1]].index))
                    stack.enter_context(OnCudaStream(beside))
            yield

    def _moved(self, part: Any, place: int) -> Any:
        if place == 0:
            return part
        home, device = self._devices[0], self._devices[place]
        with self._sending(0):
            return map_tensors(lambda t: t.to(device, non_blocking=True) if t.device == home else t, part)

    def _join(self) -> None:
        """Let what the first device computes wait for all that was copied and added up beside it."""
        beside = self._beside[0]
        if beside is not None:
            current_cuda_stream(self._devices[0].index).wait_stream(beside)

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def _add_oldest(self) -> None:
        """Add the gradients of the oldest microbatch to the sums, as its backward would on one device."""
        place, made = self._pending.popleft()
        assert self._sums is not None
        with self._sending(*dict.fromkeys((0, place))), torch.no_grad():
            brought = dict(zip((tensor for tensor, _ in made), self._brought([g for _, g in made], place), strict=True))
            added = [
                (total, gradient)
                for tensor, gradient in brought.items()
                if (total := self._sums.get(tensor)) is not None
            ]
            self._sums = {
                tensor: brought.get(tensor) if total is None else total for tensor, total in self._sums.items()
            }
            if added:
                totals, gradients = zip(*added, strict=True)
                torch._foreach_add_(list(totals), list(gradients))

    def _brought(self, gradients: list[Tensor], place: int) -> list[Tensor]:
        beside = self._beside[place]
        if beside is not None:
            for gradient in gradients:
                gradient.record_stream(beside)
        if place == 0:
            return gradients
        key = tuple((gradient.shape, gradient.stride(), gradient.dtype) for gradient in gradients)
        pieces = self._pieces.get(key)
        if pieces is None:
            pieces = self._pieces[key] = FlatPieces(gradients)
        buffers = pieces.buffers(self._devices[0])
        pieces.fill(buffers, gradients)
        return pieces.views(buffers)

    # ---- what steps leave alone ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at some tensors before a step, in turn: behind it, they are what they were, and their copies, too."""
        tensors = [tensor for tensor, _ in self._replicas[0].pairs() if id(tensor) not in self._changing]
        chosen = {(self._num_looks + number) % len(tensors) for number in range(_LOOKED_AT)} if tensors else ()
        self._looked_at = [(tensors[number], checksum(tensors[number])) for number in chosen]
        self._num_looks += _LOOKED_AT

    def _look_again(self) -> None:
        found = [
            checksum(each).to(total.device, non_blocking=True) != total
            for tensor, total in self._looked_at
            for each in (tensor, *(replica.copy_of(tensor) for replica in self._replicas))
        ]
        if not found:
            return
        differs, event = torch.cat(found).any(), None
        if differs.is_cuda:
            # Into memory that is not page-locked, the host would wait for the copy.
            differs = torch.empty_like(differs, device="cpu", pin_memory=True).copy_(differs, non_blocking=True)
            event = torch.cuda.Event()
            event.record(current_cuda_stream(self._devices[0].index))
        self._looks.append((event, differs))

    def _check_looks(self, *, wait: bool) -> None:
        while self._looks and (wait or self._looks[0][0] is None or self._looks[0][0].query()):
            event, differs = self._looks.popleft()
            if event is not None:
                event.synchronize()
            if differs:
                raise UnsupportedModelError(
                    "a step has changed a parameter or a buffer that no step before had changed, and not in the same way on "
                    "all devices: use Trainer(devices=1)"
                )
