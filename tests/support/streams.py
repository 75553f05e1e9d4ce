"""A race detector: CUDA devices whose tensors are on the host, and vector clocks of what CUDA would order.

Operations run eagerly, so all results are right; but each is noted at the fake stream on which CUDA would have launched it.
What it reads must have been written before, and what it writes nobody may still read or write, as far as events, waits and
barriers between streams order them. A stream's clock tells, for each stream and for the host's threads, up to which of its
operations all is over when the stream's next operation starts. Devices are as slow as they may be: no event has happened
unless somebody waited for it.

The nodes of a backward run on the streams on which they were made, and wait for the nodes that made their gradients: see
`Backward`, which does what torch's own engine does on GPUs, and no more.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import lightning_harmony.setup.settings
from lightning_harmony.engine.devices import cuda_device
from lightning_harmony.engine.devices import stream as stream_module
from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event, HostEvent, HostStream
from lightning_harmony.engine.lanes.lane import Lane, LanePool
from lightning_harmony.engine.memory import stash, sums
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.structures import operations

# Of the arena, so much is one place in memory. Parameters begin at its multiples.
GRANULE = 64


class Race(NamedTuple):
    """Two accesses that nothing orders."""

    what: str
    first: str
    second: str


class Clock(dict[str, int]):
    """Up to which of its operations each stream's work is over.

    Attributes:
        version: another one after each change.
    """

    version = 0

    def advance(self, name: str) -> int:
        """One more operation of a stream: how many there are now."""
        self[name] = tick = self.get(name, 0) + 1
        self.version += 1
        return tick

    def join(self, other: Clock) -> None:
        """Both have happened."""
        known = self.get
        for name, tick in other.items():
            if tick > known(name, 0):
                self[name] = tick
                self.version += 1

    def copy(self) -> Clock:
        """As it is now."""
        return Clock(self)


class Access(NamedTuple):
    """An operation on a stream that used some memory."""

    stream: str
    tick: int
    name: str
    where: tuple[tuple[CodeType, int], ...]

    @property
    def label(self) -> str:
        """What is said of it."""
        return f"{self.name} on {self.stream} in {_text(self.where)}"


@dataclass
class Memory:
    """What was done to a piece of memory.

    Attributes:
        write: the last one.
        reads: the last one of each stream since then.
        before: what may still use the memory, which had been another tensor's.
    """

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)
    before: dict[str, Access] = field(default_factory=dict)


class FakeStream:
    """What `torch.cuda.Stream` is, with a clock."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, name: str = "side", *, priority: int = 0) -> None:
        self.detector = Detector.active()
        self.device = device if device is not None else self.detector.here.current_device()
        self.device_index = self.device
        self.name = f"{name}{next(self._numbers)}@{self.device.number}"
        self.clock = Clock()
        # The clock of the thread that the last operation came from, and which version of it.
        self._joined: Clock | None = None
        self._joined_version = 0
        # Tensors that are gone, whose memory the next one that is allocated on this stream may get.
        self.freed: list[dict[str, Access]] = []

    def tick(self) -> int:
        """Another operation is launched here."""
        here = self.detector.here.clock
        # Most operations come from a thread that knows nothing new.
        if here is not self._joined or here.version != self._joined_version:
            self._joined, self._joined_version = here, here.version
            self.clock.join(here)
        return self.clock.advance(self.name)

    def wait_stream(self, other: FakeStream) -> None:
        """What comes after is ordered after what the other stream has."""
        self.wait_event(other.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        """What comes after is ordered after the event."""
        if not self.detector.leaves_out(sys._getframe(1)):
            self.clock.join(event.clock)

    def record_event(self) -> FakeEvent:
        """The event of all that was launched here."""
        event = FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        self.detector.wait_for(self.clock)


@dataclass
class Block(Memory):
    """Memory of a device.

    Attributes:
        pool: the stream that it was allocated on, to which it returns.
        num_bytes: how much.
        recorded: the streams that the allocator was told of.
        uses: the last one of each stream.
    """

    pool: FakeStream = field(kw_only=True)
    num_bytes: int = field(kw_only=True)
    recorded: list[FakeStream] = field(default_factory=list)
    uses: dict[str, Access] = field(default_factory=dict)


class FakeEvent:
    """What `torch.cuda.Event` is."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.detector = Detector.active()
        self.clock = Clock()

    def record(self, stream: FakeStream | None = None) -> None:
        """Note what the stream has come to."""
        stream = stream or self.detector.here.current_stream()
        stream.tick()
        self.clock = stream.clock.copy()

    def wait(self, stream: FakeStream | None = None) -> None:
        """A stream waits, that of the current device if none is given."""
        (stream or self.detector.here.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        self.detector.wait_for(self.clock)

    def query(self) -> bool:
        """Whether the host knows that it has happened."""
        here = self.detector.here.clock
        return all(here.get(name, 0) >= tick for name, tick in self.clock.items())

    def elapsed_time(self, end: FakeEvent) -> float:
        """Some milliseconds."""
        return 1.0


class Place(str):
    """A fake `torch.device`: the host's to torch, and yet one of several."""

    type = "cpu"
    index = None
    number: int

    @staticmethod
    def of(number: int) -> Place:
        """The device with a number."""
        place = Place("cpu")
        place.number = number
        return place

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, torch.device) and other.type == "cpu")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Here:
    """What CUDA keeps for each thread, and up to where this thread knows that devices have come."""

    def __init__(self, detector: Detector, clock: Clock, default: Sequence[Place]) -> None:
        self.clock = clock
        self.default = default
        self.device: Place | None = None
        self.streams: dict[int, FakeStream] = {}
        self.on_host = False
        # The backward that runs.
        self.backward: Backward | None = None
        # The device and the streams that were current from an autograd node's number on.
        self._since: list[int] = [-1]
        self._were: list[tuple[Place | None, dict[int, FakeStream]]] = [(None, {})]
        # The streams where leaves were first used, by their identities.
        self._leaves: dict[int, tuple[weakref.ref[Tensor], FakeStream]] = {}
        self._detector = detector

    def current_device(self) -> Place:
        """The current one: the first if none was chosen."""
        return self.device or self.default[0]

    def current_stream(self, device: Any = None) -> FakeStream:
        """That of a device."""
        return self._stream(self.streams, (device if isinstance(device, Place) else self.current_device()).number)

    def set(self, device: Place | None, streams: dict[int, FakeStream]) -> None:
        """Make these current."""
        self.device, self.streams = device, streams
        self._since.append(torch._C._autograd._get_sequence_nr())
        self._were.append((device, streams))

    def note_leaves(self, leaves: Iterable[Tensor]) -> None:
        """An operation on the current device takes these, to which graphs lead."""
        for leaf in leaves:
            known = self._leaves.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._leaves[id(leaf)] = weakref.ref(leaf), self.current_stream()

    def stream_of(self, node: Any, device: Place | None) -> FakeStream:
        """The stream on which a node runs: the one that was current when it was made.

        Args:
            node: the node.
            device: that of its gradients, which is that of what it made. None where they are not at hand.
        """
        if hasattr(node, "variable"):
            known = self._leaves.get(id(node.variable))
            return self.current_stream() if known is None or known[0]() is not node.variable else known[1]
        then, streams = self._were[bisect.bisect_right(self._since, node._sequence_nr()) - 1]
        return self._stream(streams, (device or then or self.default[0]).number)

    def _stream(self, streams: dict[int, FakeStream], number: int) -> FakeStream:
        return streams.get(number) or self._detector.default_stream(number)


class Backward:
    """One run of the autograd engine, as it orders nodes on GPUs (`torch/csrc/autograd/engine.cpp`, `input_buffer.cpp`).

    A node runs on one stream: the one that was current in the forward on the device of what it made there. On all other
    devices those streams are current that were so for the caller. Before it runs, its stream waits for the streams of the
    nodes that made its gradients, as far as these had come then, and the allocator is told that it uses those gradients.
    Gradients that meet are added on the stream of the node that takes them, if they are on its device. When all is over, the
    caller's streams wait for those of the leaves, and callbacks run on the caller's.

    Args:
        detector: it looks at.
        roots: the edges where it begins, each a node and the number of its gradient.
        ends: the nodes at which gradients are asked for.
        waits_for_default: what torch does up to 2.8 with a gradient that comes from a node of another device: who takes it
            waits for the default stream of its own device, where later releases wait for the node's stream.
    """

    def __init__(
        self, detector: Detector, roots: Iterable[tuple[Any, int]], ends: Iterable[Any], *, waits_for_default: bool
    ) -> None:
        self._detector, self._here = detector, detector.here
        self._waits_for_default = waits_for_default
        self._before = self._here.device, self._here.streams
        self._outer, self._here.backward = self._here.backward, self
        self._running: tuple[Any, FakeStream] | None = None
        roots = list(roots)
        self._nodes: dict[Any, Any] = {_key(node): node for node, _ in roots}
        self._roots = frozenset((_key(node), slot) for node, slot in roots)
        self._ends = [_key(node) for node in ends]
        self._producers: dict[Any, list[Any]] = {}
        self._slots: dict[tuple[Any, int], list[Any]] = {}
        # Of the edges of the node that runs, those whose gradients have been given to others.
        self._num_given = 0
        self._ended: dict[Any, tuple[FakeStream, Clock]] = {}
        self._hooks: list[Any] = []
        found = list(self._nodes.values())
        for node in found:
            for following, slot in node.next_functions:
                if following is None:
                    continue
                self._slots.setdefault((_key(following), slot), []).append(_key(node))
                self._producers.setdefault(_key(following), []).append(_key(node))
                if _key(following) not in self._nodes:
                    self._nodes[_key(following)] = following
                    found.append(following)
        for key, node in self._nodes.items():
            self._hooks.append(node.register_prehook(lambda gradients, key=key: self._begin(key, gradients)))

    def end(self) -> None:
        """All nodes have run."""
        self.leave_nodes()
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()
        self._here.backward = self._outer

    def leave_nodes(self) -> None:
        """What comes next runs where the caller is."""
        self._finish()
        self._here.set(*self._before)
        for key in self._ends:
            if key not in self._ended and key in self._nodes:
                self._wait(self._producers.get(key, ()), self._here.stream_of(self._nodes[key], None), ())
        for key, node in self._nodes.items():
            if key in self._ends or (key in self._ended and not node.next_functions):
                stream, clock = self._ended.get(key) or (
                    self._here.stream_of(node, None),
                    self._here.stream_of(node, None).clock,
                )
                current = self._here.current_stream(stream.device)
                if current is not stream:
                    current.clock.join(clock)

    def adding(self, there: Tensor, gradient: Tensor) -> None:
        """The engine itself adds a gradient of the node that has run to another node's, whose stream becomes current."""
        assert self._running is not None
        key, stream = self._running
        block, edges = self._detector.block(gradient), self._nodes[key].next_functions
        while block is not None and self._num_given < len(edges):
            following, slot = edges[self._num_given]
            self._num_given += 1
            earlier = self._slots.get((_key(following), slot), []) if following is not None else []
            earlier = [each for each in earlier if each in self._ended]
            is_root = following is not None and (_key(following), slot) in self._roots
            if earlier or is_root:
                taking = self._here.stream_of(following, block.pool.device)
                if taking.device is block.pool.device:
                    self._ended[key] = stream, stream.clock.copy()
                    if is_root:
                        self._wait_for_caller(taking, [there])
                    self._wait(earlier, taking, [there])
                    self._wait([key], taking, [gradient])
                    self._here.set(taking.device, {**self._before[1], taking.device.number: taking})
                    del self._ended[key]
                return

    def _begin(self, key: Any, gradients: Sequence[Tensor | None]) -> None:
        node = self._nodes[key]
        self._finish()
        blocks = [self._detector.block(gradient) for gradient in gradients if gradient is not None]
        stream = self._here.stream_of(node, next((block.pool.device for block in blocks if block is not None), None))
        if any(key == root for root, _ in self._roots):
            self._wait_for_caller(stream, gradients)
        self._wait(self._producers.get(key, ()), stream, gradients)
        self._running, self._num_given = (key, stream), 0
        self._here.set(stream.device, {**self._before[1], stream.device.number: stream})

    def _finish(self) -> None:
        if self._running is not None:
            key, stream = self._running
            self._ended[key] = stream, stream.clock.copy()
            self._running = None

    def _wait_for_caller(self, stream: FakeStream, gradients: Iterable[Tensor | None]) -> None:
        """Let a stream wait for what the caller begins with, and tell the allocator that it uses that."""
        caller = self._here._stream(self._before[1], stream.device.number)
        if caller is not stream:
            stream.clock.join(caller.clock)
            self._tell_allocator(stream, gradients)

    def _wait(self, producers: Iterable[Any], stream: FakeStream, gradients: Iterable[Tensor | None]) -> None:
        """Let a stream wait for some nodes on others, and tell the allocator that it uses what they made."""
        others = [self._ended[each] for each in producers if each in self._ended]
        others = [(other, clock) for other, clock in others if other is not stream]
        for other, clock in others:
            is_default = self._waits_for_default and other.device is not stream.device
            stream.clock.join(self._detector.default_stream(stream.device.number).clock if is_default else clock)
        if others:
            self._tell_allocator(stream, gradients)

    def _tell_allocator(self, stream: FakeStream, gradients: Iterable[Tensor | None]) -> None:
        for gradient in gradients:
            block = None if gradient is None else self._detector.block(gradient)
            if block is not None and stream not in block.recorded:
                block.recorded.append(stream)


def _key(node: Any) -> Any:
    """What tells nodes apart: all have a number of their own but those that add to leaves."""
    return ("leaf", id(node.variable)) if hasattr(node, "variable") else node._sequence_nr()


class Engine:
    """Torch's autograd engine, whose runs the detector sees."""

    def __init__(self, detector: Detector, engine: Any) -> None:
        self._detector, self._engine = detector, engine

    def run_backward(self, outputs: Sequence[Any], gradients: Any, *options: Any, **named: Any) -> Any:
        """Run it."""
        inputs = options[2] if len(options) > 2 else named.get("inputs", ())
        roots, ends = ([_edge(each) for each in several or ()] for several in (outputs, inputs))
        backward = Backward(
            self._detector, roots, [node for node, _ in ends], waits_for_default=self._detector.waits_for_default
        )
        try:
            return self._engine.run_backward(outputs, gradients, *options, **named)
        finally:
            backward.end()

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call something when a backward is over."""
        backward = self._detector.here.backward

        def called() -> None:
            if backward is not None:
                backward.leave_nodes()
            callback()

        self._engine.queue_callback(called)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _edge(end: Any) -> tuple[Any, int]:
    edge = get_gradient_edge(end) if isinstance(end, Tensor) else end
    return edge.node, edge.output_nr


class Detector:
    """Notes what is done on fake devices, and which of it nothing orders.

    Args:
        left_out: names of functions whose waits are not made, to see that this is found.
        waits_for_default: as for `Backward`.

    Attributes:
        races: what was found.
        num_operations: how many operations on devices were looked at.
    """

    _active: Detector | None = None

    def __init__(self, left_out: Iterable[str] = (), *, waits_for_default: bool = False) -> None:
        self.waits_for_default = waits_for_default
        self.races: dict[Race, None] = {}
        self.num_operations = 0
        self.places: list[Place] = []
        self._left_out = frozenset(left_out)
        self._local = threading.local()
        self._baton = Clock()
        self._default_streams: dict[int, FakeStream] = {}
        self._blocks: dict[int, Block] = {}
        self._allocated: Counter[int] = Counter()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._registered: list[tuple[int, int]] = []
        self._granules: dict[int, Memory] = {}
        self._lock = threading.RLock()
        # Up to where a thread has waited for each stream.
        self._over = Clock()

    @staticmethod
    def active() -> Detector:
        """The one that is at work."""
        assert Detector._active is not None
        return Detector._active

    @property
    def here(self) -> Here:
        """Of the calling thread. Lanes and who drives them have one order, and so one clock."""
        here: Here | None = getattr(self._local, "here", None)
        if here is None:
            name = threading.current_thread().name
            is_worker = name.startswith("harmony-") and not name.startswith("harmony-lane")
            here = self._local.here = Here(self, Clock() if is_worker else self._baton, self.places)
        return here

    def default_stream(self, number: int) -> FakeStream:
        """The one that is current where nobody chose another."""
        if number not in self._default_streams:
            self._default_streams[number] = FakeStream(self.places[number], "default")
        return self._default_streams[number]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context in which the calling thread's operations are seen."""
        if getattr(self._local, "is_watched", False):
            yield
            return
        self._local.is_watched = True
        try:
            with Mode(self):
                yield
        finally:
            self._local.is_watched = False

    def leaves_out(self, frame: Any) -> bool:
        """Whether a wait is one of those that are not made."""
        return bool(self._left_out) and any(name in self._left_out for name in _callers(frame))

    def wait_for(self, clock: Clock) -> None:
        """The calling thread waits until so much is over."""
        self.here.clock.join(clock)
        with self._lock:
            self._over.join(clock)

    # ---- what is where ---------------------------------------------------------------------------------------------------

    def block(self, tensor: Tensor) -> Block | None:
        """The memory of a tensor on a device."""
        if tensor.layout is not torch.strided:
            return None
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def allocated_bytes(self, number: int) -> int:
        """What lives on a device."""
        return self._allocated[number]

    def allocate(self, tensor: Tensor, stream: FakeStream) -> None:
        """A tensor was made on a device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = Block(pool=stream, num_bytes=storage.nbytes())
        if stream.freed:
            clock = stream.clock.copy()
            clock.join(self.here.clock)
            stream.freed = [late for uses in stream.freed if (late := _later(uses, clock))]
            for uses in stream.freed:
                block.before.update(uses)
        with self._lock:
            self._blocks[key] = block
            self._allocated[stream.device.number] += block.num_bytes
            self._storages[key] = weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        with self._lock:
            block, _ = self._blocks.pop(key), self._storages.pop(key)
            self._allocated[block.pool.device.number] -= block.num_bytes
        # The allocator waits for the streams that it was told of, and what a thread has waited for is over: whoever drops the
        # last reference to a tensor does so behind those who have waited for its uses, and have dropped theirs.
        uses = {**block.before, **block.uses}
        uses.pop(block.pool.name, None)
        if not uses:
            return
        with self._lock:
            known = self._over.copy()
        known.join(self.here.clock)
        for each in block.recorded:
            known.join(each.clock)
        if late := _later(uses, known):
            block.pool.freed.append(late)

    def pin(self, buffer: Tensor) -> None:
        """A host buffer is one that copies are not waited for."""
        span = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
        self._registered.append(span)
        weakref.finalize(buffer.untyped_storage(), self._unpin, *span)

    def _unpin(self, begin: int, end: int) -> None:
        self._registered.remove((begin, end))
        for number in range(begin // GRANULE, -(-end // GRANULE)):
            self._granules.pop(number, None)

    def register(self, buffer: Tensor) -> None:
        """The same of memory that others have views of, each with a storage of its own."""
        self._registered.append((buffer.data_ptr(), buffer.data_ptr() + buffer.numel()))

    def _host_memory(self, tensor: Tensor) -> list[Memory]:
        """The places of the host's page-locked memory that a tensor has."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return []
        start = tensor.data_ptr()
        for begin, end in self._registered:
            if begin <= start < end:
                break
        else:
            return []
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        last = start + extent * tensor.element_size() - 1
        numbers = range(start // GRANULE, last // GRANULE + 1)
        return [self._granules.setdefault(number, Memory()) for number in numbers]

    # ---- what is done ----------------------------------------------------------------------------------------------------

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation has run."""
        operation = _operation(func)
        name = operation.name
        read, written = _operands(operation, args, kwargs)
        operands = [*read, *written]
        devices = {block.pool.device.number for tensor in operands if (block := self.block(tensor)) is not None}
        fresh = [
            leaf
            for leaf in _tensors_of(result)
            if leaf.layout is torch.strided and self.block(leaf) is None and not _is_any(leaf, operands)
        ]
        here = self.here
        if name.startswith("aten.copy_") and len(devices) == 2:
            self._copy_between(written[0], read[-1], name)
            return
        if len(devices) > 1:
            self._report(name, f"operands on devices {sorted(devices)}", _text(_where()))
        if not devices and (here.on_host or (not here.streams and here.device is None) or read or written):
            self._access_host(name, read, written)
            return
        number = min(devices, default=here.current_device().number)
        if (
            here.backward is not None
            and len(read) == 2
            and name.startswith("aten.add")
            and _is_of_engine(sys._getframe(1))
        ):
            here.backward.adding(*read)
        stream = here.current_stream(self.places[number])
        for leaf in fresh:
            if self.block(leaf) is None:
                self.allocate(leaf, stream)
        if name.startswith(("aten.empty", "aten.new_empty")):
            return
        self.num_operations += 1
        self._access(stream, name, read, [*written, *fresh])
        if self._stops_the_host(operation, args, kwargs, read, written):
            stream.synchronize()

    def _copy_between(self, target: Tensor, source: Tensor, name: str) -> None:
        """From device to device: on the source's stream, which waits for the target's, and the other way round."""
        source_block, target_block = self.block(source), self.block(target)
        assert source_block is not None
        assert target_block is not None
        runs, other = (self.here.current_stream(block.pool.device) for block in (source_block, target_block))
        runs.tick()
        other.tick()
        runs.clock.join(other.clock)
        self.num_operations += 1
        self._access(runs, name, [source], [target])
        other.clock.join(runs.clock)

    def _access(self, stream: FakeStream, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        self._touch(Access(stream.name, stream.tick(), name, _where()), stream.clock, read, written)

    def _access_host(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        clock, thread = self.here.clock, "host" if self.here.clock is self._baton else threading.current_thread().name
        self._touch(Access(thread, clock.advance(thread), name, _where()), clock, read, written)

    def _touch(self, access: Access, clock: Clock, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        for is_write, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if tensor.numel() == 0:
                    continue
                block = self.block(tensor)
                for memory in [block] if block is not None else self._host_memory(tensor):
                    self._touch_memory(memory, access, clock, is_write=is_write)

    def _touch_memory(self, memory: Memory, access: Access, clock: Clock, *, is_write: bool) -> None:
        known = clock.get
        earlier = [memory.write] if memory.write is not None else []
        if is_write:
            earlier += [*memory.reads.values(), *memory.before.values()]
        for other in earlier:
            if known(other.stream, 0) < other.tick and other.stream != access.stream:
                of = "memory that is used again" if other in memory.before.values() else "memory"
                self._report(of, other.label, access.label)
        if is_write:
            memory.write = access
            if memory.reads:
                memory.reads = {}
            if memory.before:
                memory.before = {}
        else:
            memory.reads[access.stream] = access
        if isinstance(memory, Block):
            memory.uses[access.stream] = access

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        """The allocator is told of a stream."""
        block = self.block(tensor)
        if block is not None and not self.leaves_out(sys._getframe(1)):
            block.recorded.append(stream)

    def _stops_the_host(
        self, operation: Operation, args: Any, kwargs: Any, read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> bool:
        """Whether the host waits for an operation: what it asks for, or copies of memory that is not page-locked."""
        if operation.stops_the_host:
            return True
        if not operation.name.startswith("aten.copy_"):
            return False
        on_host = [tensor for tensor in [*read, *written] if self.block(tensor) is None]
        is_blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return bool(on_host) and (is_blocking or not self._host_memory(on_host[0]))

    def _report(self, what: str, first: str, second: str) -> None:
        self.races[Race(what, first, second)] = None


class Mode(TorchDispatchMode):
    """Shows all operations of a thread to the detector."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # There is nothing to compile in it, and to tell so takes longer than to look.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # On a GPU, nothing calls this: a mode of torch functions sees nothing of it.
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
            if torch.is_grad_enabled():
                operands = _tensors_of([*args, *kwargs.values()] if kwargs else args)
                leaves = [leaf for leaf in operands if leaf.requires_grad and leaf.is_leaf]
                if leaves:
                    self._detector.here.note_leaves(leaves)
            if not func.is_view:
                self._detector.note(func, args, kwargs, result)
        return result


def _is_of_engine(frame: Any) -> bool:
    """Whether no Python runs an operation, but the autograd engine."""
    # The mode, and how torch calls it.
    while frame.f_code.co_name in ("note", "__torch_dispatch__", "_fn", "inner"):
        frame = frame.f_back
    return bool(frame.f_code is Engine.run_backward.__code__)


@dataclass(frozen=True)
class Operation:
    """What is the same in all calls of an operation.

    Attributes:
        name: of it.
        makes_empty: whether it touches no memory.
        overwrites: whether it does not read what it writes.
        arguments: the name of each, and whether it is written.
        stops_the_host: whether the host waits for what it asks for.
    """

    name: str
    makes_empty: bool
    overwrites: bool
    arguments: tuple[tuple[str, bool], ...]
    stops_the_host: bool


@cache
def _operation(func: Any) -> Operation:
    name = str(func)
    return Operation(
        name,
        makes_empty="empty" in name,
        overwrites=any(word in name for word in ("copy_", "fill_", "zero_")),
        arguments=tuple(
            (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
            for argument in func._schema.arguments
        ),
        stops_the_host=any(word in name for word in ("_local_scalar_dense", "equal.default", "nonzero", "is_nonzero")),
    )


def _operands(operation: Operation, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    if operation.makes_empty:
        return read, written
    for position, (name, is_written) in enumerate(operation.arguments):
        tensors = _tensors_of(args[position] if position < len(args) else kwargs.get(name))
        if is_written:
            written += tensors
        if not is_written or not operation.overwrites:
            read += tensors
    return read, written


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an operand or a result: what torch shows to modes has them in lists and tuples only."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Tensor):
                found.append(each)
            elif isinstance(each, list | tuple):
                found += _tensors_of(each)
    return found


def _is_any(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    key = tensor.untyped_storage()._cdata
    return any(other.layout is torch.strided and other.untyped_storage()._cdata == key for other in others)


def _later(uses: dict[str, Access], clock: Clock) -> dict[str, Access]:
    """The uses that may not be over."""
    return {name: use for name, use in uses.items() if clock.get(name, 0) < use.tick}


def _callers(frame: Any) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def _where() -> tuple[tuple[CodeType, int], ...]:
    """The innermost functions of the engine that are running, and their lines."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < 5:
        if "lightning_harmony" in frame.f_code.co_filename:
            found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(found)


def _text(where: Iterable[tuple[CodeType, int]]) -> str:
    return " < ".join(f"{code.co_filename.rsplit('/', 1)[-1]}:{line} {code.co_name}" for code, line in where)


# ---- what stands for torch.cuda ------------------------------------------------------------------------------------------


class OnDevice:
    """What `torch.cuda.device` is."""

    def __init__(self, chosen: Any) -> None:
        self._chosen = chosen

    def __enter__(self) -> None:
        self._here = here = Detector.active().here
        self._before = here.device
        here.set(self._chosen if isinstance(self._chosen, Place) else here.device, here.streams)

    def __exit__(self, *error: object) -> None:
        self._here.set(self._before, self._here.streams)


class FakeCuda:
    """What the engine asks of `torch.cuda`."""

    Stream = FakeStream
    Event = FakeEvent
    device = OnDevice

    @staticmethod
    def current_stream(device: Any = None) -> FakeStream:
        """That of a device, in the calling thread."""
        return Detector.active().here.current_stream(device)

    @staticmethod
    def current_device() -> Place:
        """Where a number would be."""
        return Detector.active().here.current_device()

    @staticmethod
    def set_stream(stream: FakeStream) -> None:
        """Make it current, and its device."""
        here = Detector.active().here
        here.set(stream.device, {**here.streams, stream.device.number: stream})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class FakeTorchC:
    """What the engine asks of `torch._C`."""

    @staticmethod
    def _cuda_getCurrentStream(device: Any) -> FakeStream:
        return Detector.active().here.current_stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._C, name)


class FakeTorch:
    """Torch, with another `torch.cuda`."""

    cuda = FakeCuda()
    _C = FakeTorchC()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class FakeCudaDevice(CudaDevice):
    """A GPU whose memory is the host's."""

    def __init__(self, number: int, capacity_bytes: int | None, *, is_one_of_several: bool) -> None:
        self.detector = Detector.active()
        self.number = number
        place = Place.of(number)
        self.detector.places[number:] = [place]
        super().__init__(cast("torch.device", place), capacity_bytes, is_one_of_several=is_one_of_several)
        self._most = 0

    @property
    def _index(self) -> int:
        return cast("int", self.torch_device)

    def allocated_bytes(self) -> int:
        """The bytes of all storages alive."""
        now = self.detector.allocated_bytes(self.number)
        self._most = max(self._most, now)
        return now

    def peak_bytes(self) -> int:
        """The most that anybody saw."""
        return max(self._most, self.allocated_bytes())

    def watch_peak(self) -> Callable[[], int]:
        """What work takes is as good as unknown."""
        before = self.allocated_bytes()
        return lambda: max(before, self.allocated_bytes()) + 4096

    def owns(self, tensor: Tensor) -> bool:
        """Whether its storage was allocated here."""
        block = self.detector.block(tensor)
        return block is not None and block.pool.device.number == self.number

    def free(self, buffer: Tensor, uses: Sequence[Event], *, is_kept: bool = False) -> None:
        """Tell the allocator that is the detector's."""
        if is_kept:
            self.detector.record_stream(buffer, self.detector.default_stream(self.number))
        super().free(buffer, uses)

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Show the detector what the lane's thread does, too."""
        with self.detector.watching(), super().lane():
            yield

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Nothing is allocated here."""
        here = self.detector.here
        before, here.on_host = here.on_host, True
        try:
            yield
        finally:
            here.on_host = before

    def copies_fast(self, tensor: Tensor) -> bool:
        """Whether the detector knows it."""
        return bool(self.detector._host_memory(tensor))

    def host_buffer(self, num_bytes: int) -> Tensor:
        """One that copies are not waited for."""
        buffer = Device.host_buffer(self, num_bytes)
        self.detector.pin(buffer)
        return buffer

    def register_host(self, buffer: Tensor) -> Callable[[], None]:
        """The same."""
        self.detector.register(buffer)
        return lambda: None


class _Recording:
    """A tensor on a fake device, as its allocator sees it."""

    device = torch.device("cpu")

    def __init__(self, tensor: Tensor, detector: Detector) -> None:
        self._tensor, self._detector = tensor, detector

    def record_stream(self, stream: FakeStream) -> None:
        """Tell the allocator."""
        self._detector.record_stream(self._tensor, stream)


def on_root(batch: Any) -> Any:
    """A batch on the first device."""
    detector = Detector.active()

    def copied(tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor)
        if detector.block(copy) is None:
            detector.allocate(copy, detector.here.current_stream())
        return copy.copy_(tensor)

    with OnDevice(detector.places[0]):
        return tree_map_only(Tensor, copied, batch)


def _show_threads(monkeypatch: pytest.MonkeyPatch, detector: Detector) -> None:
    """Let the detector see what lanes and the host's streams do, and what threads hear from each other."""
    submit = HostStream.submit

    def submit_seen(self: HostStream, work: Callable[[], None], *others: Any, **named: Any) -> HostEvent:
        known, clock = detector.here.clock.copy(), Clock()

        def seen() -> None:
            detector.here.clock.join(known)
            with detector.watching():
                work()
            clock.join(detector.here.clock)

        event = submit(self, seen, *others, **named)
        event.clock = clock  # type: ignore[attr-defined]
        return event

    def wait(self: HostEvent) -> None:
        self._future.result()
        detector.here.clock.join(getattr(self, "clock", Clock()))

    give, take = HostPool.give, HostPool.take
    given: dict[int, Clock] = {}

    def give_seen(self: HostPool, buffer: Tensor, last_use: Any) -> None:
        given[buffer.data_ptr()] = detector.here.clock.copy()
        give(self, buffer, last_use)

    def take_seen(self: HostPool, num_bytes: int, **options: Any) -> tuple[Tensor, list[Any]]:
        buffer, free = take(self, num_bytes, **options)
        # Who finds it in the pool knows what who gave it knew.
        detector.here.clock.join(given.pop(buffer.data_ptr(), Clock()))
        return buffer, free

    following = LanePool._following

    def following_seen(self: LanePool, lane: Lane) -> Lane | None:
        # A lane that has ended chooses the next one, too.
        with detector.watching():
            return following(self, lane)

    monkeypatch.setattr(LanePool, "_following", following_seen)
    monkeypatch.setattr(HostPool, "give", give_seen)
    monkeypatch.setattr(HostPool, "take", take_seen)
    monkeypatch.setattr(HostStream, "submit", submit_seen)
    monkeypatch.setattr(HostEvent, "wait", wait)
    monkeypatch.setattr(HostEvent, "synchronize", wait)


@contextmanager
def detecting(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, *, left_out: Iterable[str] = (), waits_for_default: bool = False
) -> Iterator[Detector]:
    """The context in which a fit runs on fake devices, which may be ordered wrongly."""
    detector = Detector(left_out, waits_for_default=waits_for_default)
    Detector._active = detector
    monkeypatch.setattr(stream_module, "_cuda_streams", {})
    detector.places[:] = [Place.of(number) for number in range(num_devices)]
    opened = itertools.count()

    def open_device(capacity: int | None) -> FakeCudaDevice:
        return FakeCudaDevice(next(opened) % num_devices, capacity, is_one_of_several=num_devices > 1)

    def flat(num_bytes: int, device: Any) -> Tensor:
        # Buffers may be made where no mode sees it.
        with torch.inference_mode(False):
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if isinstance(device, Place) and detector.block(buffer) is None:
            detector.allocate(buffer, detector.here.current_stream(device))
        return buffer

    def _keep_until_computed(buffer: Tensor, device: Device) -> None:
        detector.record_stream(buffer, detector.here.current_stream(device.torch_device))

    _show_threads(monkeypatch, detector)
    monkeypatch.setattr(lightning_harmony.setup.settings, "VirtualDevice", open_device)
    monkeypatch.setattr(cuda_device, "torch", FakeTorch())
    monkeypatch.setattr(cuda_device, "flat_buffer", flat)
    monkeypatch.setattr(stream_module, "torch", FakeTorch())
    monkeypatch.setattr(stash, "_keep_until_computed", _keep_until_computed)
    # What the engine does is to be seen, too.
    monkeypatch.setattr(sums, "no_dispatch", nullcontext)
    monkeypatch.setattr(operations, "_Guard", object)
    monkeypatch.setattr(stream_module, "OutOfSight", torch.no_grad)
    engine = torch.autograd.Variable._execution_engine
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine(detector, engine))
    try:
        with detector.watching():
            yield detector
    finally:
        Detector._active = None
