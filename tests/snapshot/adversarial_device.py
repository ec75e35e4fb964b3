"""A device whose streams run in any order that the events allow, drawn from a seed, and whose memory is poisoned.

It stands in for ``torch.cuda`` where :class:`~reft.snapshot.copying.cuda.CudaCopyEngine` and the parity encoder
work on tensors. Everything happens on the thread that calls, so that a seed tells the whole story: kernels are
queued, and run when the host waits, or when :meth:`AdversarialCuda.progress` is called.

Memory is that of a caching allocator. A block belongs to the stream on which it was allocated: what that stream
was given before may still write there (its former owner), and what it is given after the block was freed may
too (its next one). So both instants queue a poison on that stream. Whoever uses a block from another stream
without an event in between finds it in some order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from tests.snapshot.simulated_cuda import CudaModule

DEVICE = torch.device("meta")
"""What tensors of the device call themselves: slicing one on "cuda" takes a torch that was built for it."""
POISON = 0xA5


class Stream:
    def __init__(self, cuda: AdversarialCuda) -> None:
        self.cuda = cuda
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()
        """Of each kernel: whether it may run, and what it does."""
        cuda.streams.append(self)

    def put(self, kernel: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, kernel))

    def wait_event(self, event: Event) -> None:
        if (point := event.point) is not None:
            self.put(lambda: None, lambda: point.secs is not None)

    def synchronize(self) -> None:
        event = Event(self.cuda)
        event.record(self)
        event.synchronize()


class Point:
    secs: float | None = None


class Event:
    def __init__(self, cuda: AdversarialCuda, **_: Any) -> None:
        self._cuda = cuda
        self.point: Point | None = None

    def record(self, stream: Stream) -> None:
        self.point = point = Point()
        cuda = self._cuda

        def reach() -> None:
            cuda.now += 1e-6
            point.secs = cuda.now

        stream.put(reach)

    def query(self) -> bool:
        return self.point is None or self.point.secs is not None

    def synchronize(self) -> None:
        self._cuda.run_until(self.query)

    def elapsed_time(self, other: Event) -> float:
        assert self.point is not None
        assert other.point is not None
        assert self.point.secs is not None
        assert other.point.secs is not None
        return (other.point.secs - self.point.secs) * 1e3


class AdversarialCuda(CudaModule):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.now = 0.0
        super().__init__(Stream(self))

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802
        return Stream(self)

    def ExternalStream(self, address: int, device: Any = None) -> Stream:  # noqa: N802
        return Stream(self)

    def Event(self, **options: Any) -> Event:  # noqa: N802
        return Event(self, **options)

    # -- time --------------------------------------------------------------------------------------

    def progress(self, most: int = 8) -> None:
        """The device does some of what it was given."""
        for _ in range(self.random.randrange(most + 1)):
            if not self._step():
                return

    def run_until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            assert self._step(), "the host waits for the device for ever"

    def finish(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        ready = [s for s in self.streams if s.queue and s.queue[0][0]()]
        if not ready:
            assert not any(s.queue for s in self.streams), "streams wait for each other"
            return False
        _, kernel = self.random.choice(ready).queue.popleft()
        kernel()
        return True


class Block:
    """Memory of the caching allocator, given back when no tensor refers to it any more."""

    def __init__(self, cuda: AdversarialCuda, nbytes: int) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.owner = cuda.current_stream()
        self._poison()

    def _poison(self) -> None:
        memory = self.bytes
        self.owner.put(lambda: memory.fill_(POISON))

    def __del__(self) -> None:
        self._poison()


class DeviceTensor(torch.Tensor):
    """A tensor on the device: shapes are known at once, bytes when the device gets there."""

    __module__ = "torch.simulated"  # backends are chosen by it
    elem: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, elem: torch.Tensor, block: Block) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=DEVICE,
        )
        made.elem, made.block = elem, block
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            return args[0].elem.data_ptr()
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


_cuda: AdversarialCuda


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Views at once; what writes on the current stream, later."""
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    if func._schema.is_mutable:
        _cuda.current_stream().put(lambda: func(*plain_args, **plain_kwargs))
        written = kwargs.get("out", args[0])
        return return_and_correct_aliasing(func, args, kwargs, written)
    if func.is_view or func is torch.ops.aten.detach.default:
        source = next(a for a in args if isinstance(a, DeviceTensor))
        return DeviceTensor(func(*plain_args, **plain_kwargs), source.block)
    raise NotImplementedError(f"the simulated device has no {func}")


def _plain(value: Any) -> Any:
    return value.elem if isinstance(value, DeviceTensor) else value


class DeviceMemory(TorchFunctionMode):
    """Gives out tensors of the device where one is asked for there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is None or torch.device(device) != DEVICE:
            return func(*args, **kwargs)
        assert func in (torch.empty, torch.zeros), func
        dtype = kwargs.get("dtype", torch.float32)
        block = Block(_cuda, torch.Size(args).numel() * dtype.itemsize)
        made = DeviceTensor(block.bytes.view(dtype).reshape(args), block)
        return made.zero_() if func is torch.zeros else made


@contextmanager
def adversarial(seed: int) -> Iterator[AdversarialCuda]:
    """A device of that seed; tensors are made there as on any other."""
    global _cuda
    _cuda = AdversarialCuda(seed)
    with DeviceMemory():
        yield _cuda
