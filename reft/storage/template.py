"""Templates: state dicts without the tensors' bytes and without the values that change in every
step.

What ``engine.save_checkpoint`` would pass to ``torch.save`` becomes a tree of small tagged
lists, which :mod:`reft.state.codec` can store. A tensor is represented by its place in a
section's image, a value that changes in every step by its path in the captured host state, and
an object of one of a few listed classes by its fields. Filled with the bytes and the host state
of any later version of the same layout, a template gives the state dict of that version. Nothing
is pickled, and only the listed classes are ever constructed (P11).
"""

from __future__ import annotations

import enum
import functools
import importlib
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from reft.errors import PersistError, UnsupportedStateError
from reft.grid import Section
from reft.state import codec
from reft.state.catalogue import SectionImage
from reft.state.codec import class_path

# A list of the node's kind and its parts. The kinds are part of the stored format: add new ones,
# but never rename any.
Node = list[Any]
Path = tuple[Any, ...]
HostState = Mapping[str, Any]

_CONTAINERS: Final[dict[str, type]] = {c.__name__: c for c in (dict, OrderedDict, list, tuple)}

_CLASSES: Final = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
"""Classes of objects in DeepSpeed's checkpoints, whose complete state is their ``__dict__``."""

_ENUM_PACKAGES: Final = ("deepspeed", "torch")


ReadSection = Callable[[Section, int, int], memoryview]
"""Function that returns bytes ``[start, start + nbytes)`` of a section's image, after
verification, as a writable view."""

Resolve = Callable[[Path, Any], Path | None]
"""Function that returns, for a value at a path in the state dict, the path of the same value in
the host state; None if the value is constant."""


@dataclass(frozen=True)
class TemplateBuilder:
    """Turns the recorded state dict of a file into template nodes."""

    file: str  # Name of the file, for messages
    # Images of the live tensors: replicated and owned section
    images: tuple[SectionImage, SectionImage]
    resolve: Resolve  # Finds a value's path in the host state; every result is checked
    host_state: HostState

    def build(self, value: Any, path: Path = ()) -> Node:
        host_path = self.resolve(path, value)
        if host_path is not None:
            return self._host(value, path, host_path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) in _CONTAINERS.values():
            return self._container(value, path)
        if isinstance(value, enum.Enum):
            return self._enum(value, path)
        if class_path(value) in _CLASSES:
            return ["object", class_path(value), self._fields(value, path)]
        return self._value(value, path)

    def _fields(self, value: Any, path: Path) -> list[Any]:
        return [
            [name, self.build(v, (*path, name))]
            for name, v in getattr(value, "__dict__", {}).items()
        ]

    def _container(self, value: Any, path: Path) -> Node:
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [self.build(v, (*path, i)) for i, v in enumerate(value)]]
        items = [[self._value(k, path), self.build(v, (*path, k))] for k, v in value.items()]
        # A module's OrderedDict has an attribute ``_metadata``, which torch.save keeps.
        return ["dict", type(value).__name__, items, self._fields(value, path)]

    def _value(self, value: Any, path: Path) -> Node:
        try:
            codec.encode(value)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(
                f"{self._where(path)} is of class {class_path(value)}, which reft cannot rebuild "
                f"in a checkpoint written from memory: {error}"
            ) from error
        return ["value", value]

    def _enum(self, value: enum.Enum, path: Path) -> Node:
        cls = type(value)
        if (
            cls.__module__.partition(".")[0] not in _ENUM_PACKAGES
            or value.name not in cls.__members__
        ):
            raise UnsupportedStateError(
                f"{self._where(path)} is {value!r} of class {class_path(value)}; expected an enum "
                f"of {' or '.join(_ENUM_PACKAGES)}, or a plain value"
            )
        return ["enum", cls.__module__, cls.__qualname__, value.name]

    def _host(self, value: Any, path: Path, host_path: Path) -> Node:
        try:
            held = functools.reduce(operator.getitem, host_path, self.host_state)
        except (KeyError, IndexError, TypeError) as error:
            raise UnsupportedStateError(
                f"{self._where(path)} changes every step, but the host state has no "
                f"{_spell(host_path)}"
            ) from error
        if not same_value(held, value):
            raise UnsupportedStateError(
                f"{self._where(path)} is {value!r:.80} ({class_path(value)}), but the captured "
                f"host state says {held!r:.80} at {_spell(host_path)}; expected the same value of "
                "the same type"
            )
        return ["host", list(host_path)]

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Node:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedStateError(
                f"{self._where(path)} is a tensor of class {class_path(tensor)}; expected "
                "torch.Tensor"
            )
        form = [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            list(tensor.stride()),
            bool(tensor.requires_grad),
            type(tensor) is torch.nn.Parameter,
            self._fields(tensor, path),
        ]
        if not tensor.numel():
            return ["empty", form]
        for section, image in zip((Section.REPLICATED, Section.OWNED), self.images, strict=True):
            found = image.locate(tensor)
            if found is not None:
                return ["tensor", str(section), found, form]
        raise UnsupportedStateError(
            f"{self._where(path)} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} that "
            "is neither part of the snapshot's images nor of the captured host state; register it "
            "as a parameter or a buffer, or put it into the client state"
        )

    def _where(self, path: Path) -> str:
        return f"{self.file}: {_spell(path)}"


class Rebuilder:
    """Fills template nodes with the bytes and the host state of one version.

    Tensors at the same place share memory, as in DeepSpeed's files. No other memory is shared, so
    ``torch.save`` writes exactly the bytes of each tensor.
    """

    def __init__(self, read: ReadSection, host_state: HostState) -> None:
        self._read = read
        self._host_state = host_state
        self._storages: dict[tuple[str, int, int], torch.Tensor] = {}

    def build(self, node: Node) -> Any:
        match node:
            case ["value", value]:
                return value
            case [("list" | "tuple") as kind, items]:
                return _CONTAINERS[kind](map(self.build, items))
            case [("host" | "dict" | "tensor" | "empty" | "object" | "enum") as kind, *parts]:
                return getattr(self, f"_{kind}")(*parts)
        raise PersistError(
            f"the template has a node of kind {node[0]!r}; was it written by a newer reft?"
        )

    def _host(self, path: list[Any]) -> Any:
        try:
            return functools.reduce(operator.getitem, path, self._host_state)
        except (KeyError, IndexError, TypeError) as error:
            raise PersistError(
                f"the host state of the version has no {_spell(tuple(path))}, which its checkpoint "
                "template refers to"
            ) from error

    def _dict(self, container: str, items: list[list[Node]], attributes: list[Any]) -> Any:
        made = _CONTAINERS[container]((self.build(k), self.build(v)) for k, v in items)
        for name, node in attributes:
            setattr(made, name, self.build(node))
        return made

    def _object(self, name: str, fields: list[Any]) -> Any:
        if name not in _CLASSES:
            raise PersistError(
                f"the template names the class {name}; expected one of {', '.join(_CLASSES)}"
            )
        module, _, attribute = name.rpartition(".")
        cls = getattr(importlib.import_module(module), attribute)
        made = cls.__new__(cls)
        vars(made).update((field, self.build(node)) for field, node in fields)
        return made

    def _enum(self, module: str, qualname: str, name: str) -> enum.Enum:
        cls: Any = None
        if module.partition(".")[0] in _ENUM_PACKAGES:
            cls = importlib.import_module(module)
            for part in qualname.split("."):
                cls = getattr(cls, part, None)
        if not isinstance(cls, enum.EnumMeta) or name not in cls.__members__:
            raise PersistError(
                f"the template names {module}.{qualname}.{name}, which is not an enum member here"
            )
        member: enum.Enum = cls.__members__[name]
        return member

    def _tensor(self, section: str, offset: int, form: list[Any]) -> torch.Tensor:
        dtype, shape, stride = codec.torch_dtype(form[0]), form[1], form[2]
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        extent = (last + 1) * dtype.itemsize
        place = (section, offset, extent)
        if place not in self._storages:
            view = self._read(Section(section), offset, extent)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._storages[place] = torch.frombuffer(view, dtype=torch.uint8)
        flat = self._storages[place].view(dtype)
        return self._finish(flat.as_strided(shape, stride), form)

    def _empty(self, form: list[Any]) -> torch.Tensor:
        return self._finish(
            torch.empty_strided(form[1], form[2], dtype=codec.torch_dtype(form[0])), form
        )

    def _finish(self, tensor: torch.Tensor, form: list[Any]) -> torch.Tensor:
        _, _, _, requires_grad, is_parameter, attributes = form
        if is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        else:
            tensor.requires_grad_(requires_grad)
        for name, node in attributes:
            setattr(tensor, name, self.build(node))
        return tensor


def same_value(a: Any, b: Any) -> bool:
    """Return whether two values are equal in types, values and tensors' bits at all levels; the
    tensors' classes are ignored.
    """
    try:
        return codec.encode(a) == codec.encode(b)
    except UnsupportedStateError:
        return False


def _spell(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path) or "the whole of it"
