"""Encodes host state as bytes: msgpack with extension types, never pickle.

A decoded value has the types and the bits of the encoded one (NaN payloads, negative zero, 16-bit
floats, integers of any size). Only a fixed list of types is encoded, and decoding calls only their
constructors, so bytes from another host can create data but not run code (P11). (safetensors holds
tensors only; ``torch.load(weights_only=True)`` still runs an unpickler, and refuses most types that
client state may contain.)

Encoding and decoding copy tensors and arrays; decoded tensors are on the CPU. Autograd state and
memory format are lost, and an object that is referenced twice becomes two objects. torch and
numpy are imported only when a value needs them, so that small processes can decode plain state.
"""

from __future__ import annotations

import enum
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from math import prod
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, Final

import msgpack

from reft.errors import ReftError, UnsupportedStateError

if TYPE_CHECKING:
    import numpy as np
    import torch

_MAX_DEPTH: Final = 100
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


class DecodeError(ReftError, ValueError):
    """The bytes are not an encoded value, are truncated, or name a type that this process lacks."""


class _Ext(enum.IntEnum):
    """Extension codes. They are part of the stored format: new codes may be added, but never
    change a number."""

    TUPLE = 1
    INT = 2
    COMPLEX = 3
    SET = 4
    FROZENSET = 5
    DICT = 6
    ORDERED_DICT = 7
    TENSOR = 8
    ARRAY = 9
    SCALAR = 10
    TORCH_DTYPE = 11
    TORCH_SIZE = 12
    TORCH_DEVICE = 13
    PATH = 14
    ENUM = 15
    NUMPY_DTYPE = 16
    BYTEARRAY = 17
    DEQUE = 18
    RANGE = 19
    SLICE = 20
    NAMESPACE = 21
    COUNTER = 22


_KEY_TYPES = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, enum.Enum)


def encode(value: Any) -> bytes:
    """Encode a value.

    Raises:
        UnsupportedStateError: the value contains a type that is not on the list.
    """
    return _pack(_lower(value, "state", 0))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode the output of :func:`encode`. The value shares no memory with ``data``.

    Raises:
        DecodeError: the bytes are not an encoded value.
    """
    try:
        return _unpack(data)
    except DecodeError:
        raise
    # msgpack and the constructors raise errors of many classes for damaged bytes
    except Exception as e:
        raise DecodeError(
            f"{memoryview(data).nbytes} bytes cannot be decoded ({type(e).__name__}: {e}); "
            "expected bytes written by reft.state.codec.encode of this or an older version"
        ) from e


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of torch's own classes, whose only state is its bytes."""
    import torch

    kind = type(value)
    # torch 2.4 has no class torch.nn.Buffer.
    return kind in (torch.Tensor, torch.nn.Parameter) or kind is getattr(torch.nn, "Buffer", None)


def class_path(value: Any) -> str:
    """Return ``module.QualifiedName`` of the exact class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _pack(lowered: Any) -> bytes:
    packed: bytes = msgpack.packb(
        lowered, use_bin_type=True, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _unpack(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(
        data, raw=False, strict_map_key=True, unicode_errors="surrogatepass", ext_hook=_raise
    )


# --- encoding: every value becomes msgpack's own types and ExtType ------------------------------

_Lower = Callable[[Any, str, int], Any]


def _lower(value: Any, path: str, depth: int) -> Any:
    cls = type(value)
    if (
        value is None
        or cls in (bool, float, str, bytes)
        or (cls is int and _INT_MIN <= value <= _INT_MAX)
    ):
        return value
    if depth >= _MAX_DEPTH:
        raise UnsupportedStateError(
            f"{path} is nested more than {_MAX_DEPTH} deep, or contains itself; flatten the state"
        )
    if cls is list:
        return _items(value, path, depth + 1)
    if cls is dict and all(type(k) is str for k in value):
        return {k: _lower(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
    form = _FORMS.get(cls) or _library_form(value)
    if form is None:
        raise UnsupportedStateError(
            f"{path} is of class {class_path(value)}, which reft cannot store; use None, numbers, "
            "strings, "
            f"bytes, lists, tuples, dicts, sets, enum members, paths, torch tensors or numpy arrays"
        )
    code, lower = form
    lowered = lower(value, path, depth + 1)
    return msgpack.ExtType(int(code), lowered if code in _RAW else _pack(lowered))


def _items(value: Any, path: str, depth: int) -> list[Any]:
    return [_lower(v, f"{path}[{i}]", depth) for i, v in enumerate(value)]


def _members(value: Any, path: str, depth: int) -> list[Any]:
    # Sort a set's items by their bytes, so that equal sets have equal encodings under every hash
    # seed.
    path = f"{path}{{...}}"
    return sorted((_lower(_check_key(v, path), path, depth) for v in value), key=_pack)


def _pairs(value: dict[Any, Any], path: str, depth: int) -> list[Any]:
    return [
        [_lower(_check_key(k, path), f"{path} key", depth), _lower(v, f"{path}[{k!r}]", depth)]
        for k, v in value.items()
    ]


def _check_key(key: Any, path: str) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(key, _KEY_TYPES) or (numpy is not None and isinstance(key, numpy.generic)):
        return key
    raise UnsupportedStateError(
        f"{path} has a key or set member of class {class_path(key)}; expected None, a number, str, "
        "bytes, tuple, frozenset or enum member"
    )


def _bounds(value: Any, path: str, depth: int) -> list[Any]:
    return [_lower(part, path, depth) for part in (value.start, value.stop, value.step)]


def _library_form(value: Any) -> tuple[_Ext, _Lower] | None:
    """Return the extension code and the encoder for a value of torch or numpy, or an enum
    member; None for any other value.
    """
    form = _torch_form(value) if "torch" in sys.modules else None
    if form is None and "numpy" in sys.modules:
        form = _numpy_form(value)
    if form is None and isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return _Ext.ENUM, lambda v, path, depth: [type(v).__module__, type(v).__qualname__, v.name]
    return form


def _torch_form(value: Any) -> tuple[_Ext, _Lower] | None:
    import torch

    if is_plain(value):
        return _Ext.TENSOR, _tensor
    if type(value) is torch.Size:
        return _Ext.TORCH_SIZE, lambda v, path, depth: list(v)
    if isinstance(value, (torch.dtype, torch.device)):
        code = _Ext.TORCH_DTYPE if isinstance(value, torch.dtype) else _Ext.TORCH_DEVICE
        return code, lambda v, path, depth: str(v)
    return None


def _numpy_form(value: Any) -> tuple[_Ext, _Lower] | None:
    import numpy as np

    if type(value) is np.ndarray:
        return _Ext.ARRAY, lambda v, path, depth: [
            _dtype(v.dtype, path),
            list(v.shape),
            v.tobytes(),
        ]
    if isinstance(value, np.generic):
        return _Ext.SCALAR, lambda v, path, depth: [_dtype(v.dtype, path), v.tobytes()]
    if isinstance(value, np.dtype):
        return _Ext.NUMPY_DTYPE, lambda v, path, depth: _dtype(v, path)
    return None


def _tensor(value: torch.Tensor, path: str, depth: int) -> list[Any]:
    import torch

    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise UnsupportedStateError(
            f"{path} is a tensor with layout {value.layout} on {value.device} (quantized: "
            f"{value.is_quantized}, nested: {value.is_nested}); expected a dense tensor with "
            "memory: convert it before storing it"
        )
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype), list(value.shape), raw]


def _dtype(dtype: np.dtype[Any], path: str) -> str:
    import numpy as np

    if dtype.hasobject or dtype.names is not None or np.dtype(dtype.str) != dtype:
        raise UnsupportedStateError(
            f"{path} is a numpy value of dtype {dtype!r}; expected numbers, strings, bytes or "
            "times (no objects, no fields): store its columns one by one"
        )
    return dtype.str


# Extensions whose payload is the value's bytes, not a msgpack document
_RAW = (_Ext.INT, _Ext.BYTEARRAY)
_FORMS: dict[type, tuple[_Ext, _Lower]] = {
    int: (
        _Ext.INT,
        lambda v, path, depth: v.to_bytes((v.bit_length() + 8) // 8, "little", signed=True),
    ),
    bytearray: (_Ext.BYTEARRAY, lambda v, path, depth: bytes(v)),
    tuple: (_Ext.TUPLE, _items),
    set: (_Ext.SET, _members),
    frozenset: (_Ext.FROZENSET, _members),
    dict: (_Ext.DICT, _pairs),
    OrderedDict: (_Ext.ORDERED_DICT, _pairs),
    Counter: (_Ext.COUNTER, _pairs),
    deque: (_Ext.DEQUE, lambda v, path, depth: [v.maxlen, _items(v, path, depth)]),
    complex: (_Ext.COMPLEX, lambda v, path, depth: [v.real, v.imag]),
    Namespace: (_Ext.NAMESPACE, lambda v, path, depth: _lower(dict(vars(v)), path, depth)),
    PosixPath: (_Ext.PATH, lambda v, path, depth: str(v)),
    range: (_Ext.RANGE, _bounds),
    slice: (_Ext.SLICE, _bounds),
}

# --- decoding ------------------------------------------------------------------------------------


def _raise(code: int, data: bytes) -> Any:
    """Create the value of an extension. A code that is not on the list raises an error."""
    if code not in _MAKE:
        raise DecodeError(
            f"found extension code {code}; this version knows {min(_Ext)}..{max(_Ext)}"
        )
    return _MAKE[code](data if code in _RAW else _unpack(data))


def torch_dtype(name: Any) -> torch.dtype:
    import torch

    dtype = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(
            f"found the tensor dtype {name!r}, which torch {torch.__version__} does not have"
        )
    return dtype


def make_tensor(parts: Any) -> torch.Tensor:
    import torch

    name, shape, raw = parts
    dtype = torch_dtype(name)
    if prod(shape) * dtype.itemsize != len(raw):
        raise DecodeError(f"found {len(raw)} bytes for a {dtype} tensor of shape {tuple(shape)}")
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if raw:
        # The bytearray is a copy, so the tensor shares no memory with the source buffer.
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        tensor.reshape(-1).view(torch.uint8).copy_(flat)
    return tensor


def _make_dtype(name: Any) -> np.dtype[Any]:
    import numpy as np

    if not isinstance(name, str) or "O" in name or "V" in name or "," in name:
        raise DecodeError(f"found the numpy dtype {name!r}; expected a plain one")
    return np.dtype(name)


def _make_array(parts: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    name, shape, raw = parts
    dtype = _make_dtype(name)
    return (
        np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
        if raw
        else np.empty(shape, dtype=dtype)
    )


def _make_scalar(parts: Any) -> Any:
    import numpy as np

    name, raw = parts
    dtype = _make_dtype(name)
    if dtype.itemsize == 0:  # An empty numpy string or bytes
        return np.zeros((), dtype=dtype)[()]
    return np.frombuffer(bytearray(raw), dtype=dtype)[0]


def _encode_torch(name: str) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        import torch

        return getattr(torch, name)(value)

    return make


def _make_enum(parts: Any) -> enum.Enum:
    # Look up the class only in the namespaces of modules that are already imported, so that the
    # bytes can trigger neither an import nor a module's __getattr__ (P11).
    module, qualname, name = parts
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, enum.EnumMeta) or name not in found.__members__:
        raise DecodeError(
            f"found the enum member {module}.{qualname}.{name}, which this process does not have; "
            f"import {module} before decoding, or store plain values"
        )
    member: enum.Enum = found.__members__[name]
    return member


_MAKE: dict[int, Callable[[Any], Any]] = {
    _Ext.INT: lambda data: int.from_bytes(data, "little", signed=True),
    _Ext.BYTEARRAY: bytearray,
    _Ext.TUPLE: tuple,
    _Ext.COMPLEX: lambda parts: complex(*parts),
    _Ext.SET: set,
    _Ext.FROZENSET: frozenset,
    _Ext.DICT: lambda pairs: {k: v for k, v in pairs},
    _Ext.ORDERED_DICT: lambda pairs: OrderedDict((k, v) for k, v in pairs),
    _Ext.COUNTER: lambda pairs: Counter({k: v for k, v in pairs}),
    _Ext.TENSOR: make_tensor,
    _Ext.ARRAY: _make_array,
    _Ext.SCALAR: _make_scalar,
    _Ext.TORCH_DTYPE: torch_dtype,
    _Ext.TORCH_SIZE: _encode_torch("Size"),
    _Ext.TORCH_DEVICE: _encode_torch("device"),
    _Ext.PATH: Path,
    _Ext.ENUM: _make_enum,
    _Ext.NUMPY_DTYPE: _make_dtype,
    _Ext.DEQUE: lambda parts: deque(parts[1], parts[0]),
    _Ext.RANGE: lambda parts: range(*parts),
    _Ext.SLICE: lambda parts: slice(*parts),
    _Ext.NAMESPACE: lambda parts: Namespace(**parts),
}
