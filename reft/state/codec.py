"""Host state as bytes: msgpack with extension types, never pickle.

What goes in comes out with the same types and the same bits (NaN payloads, negative zero, 16-bit floats,
integers of any size). Only a closed list of types is encoded, and decoding calls nothing but their
constructors: bytes from another host can build data, not run code (P11). (safetensors holds tensors only;
``torch.load(weights_only=True)`` still runs an unpickler, and refuses most of what client state may hold.)

Tensors and arrays are copied on both ways and land on the CPU; autograd state, memory format and the
identity of objects that are referred to twice are not kept. torch and numpy are imported only where a
value needs them, so that light processes can decode plain state.
"""

from __future__ import annotations

import enum
import sys
from argparse import Namespace
from collections import OrderedDict, deque
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
    """Bytes are not an encoded value, are cut short, or name something this process does not have."""


class _Ext(enum.IntEnum):
    """Extension codes. They are part of the stored format: append, never renumber."""

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


_KEY_TYPES = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, enum.Enum)


def encode(value: Any) -> bytes:
    """Encode ``value``.

    Raises:
        UnsupportedStateError: for a class outside the list; names the path to the value and the class.
    """
    return _pack(_lower(value, "state", 0))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that :func:`encode` was given; shares no memory with ``data``.

    Raises:
        DecodeError: if ``data`` is damaged or names an enum or dtype unknown to this process.
    """
    try:
        return _unpack(data)
    except DecodeError:
        raise
    except Exception as e:  # msgpack and the constructors raise a zoo of classes on damaged bytes
        raise DecodeError(
            f"{memoryview(data).nbytes} bytes cannot be decoded ({type(e).__name__}: {e}); expected bytes "
            f"written by reft.state.codec.encode of this or an older version"
        ) from e


def _pack(lowered: Any) -> bytes:
    packed: bytes = msgpack.packb(
        lowered, use_bin_type=True, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _unpack(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        unicode_errors="surrogatepass",
        ext_hook=_raise_ext,
    )


# --- encoding: every value becomes msgpack's own types and ExtType ------------------------------


def _lower(value: Any, path: str, depth: int) -> Any:
    cls = type(value)
    if value is None or cls in (bool, float, str, bytes):
        return value
    if depth >= _MAX_DEPTH:
        raise UnsupportedStateError(
            f"{path} is nested more than {_MAX_DEPTH} deep, or contains itself; flatten the state"
        )
    lower = _LOWER.get(cls) or _library_lowering(value)
    if lower is None:
        raise UnsupportedStateError(
            f"{path} is of class {_class_name(value)}, which reft cannot store; use None, numbers, strings, "
            f"bytes, lists, tuples, dicts, sets, enum members, paths, torch tensors or numpy arrays"
        )
    return lower(value, path, depth + 1)


def _lower_int(value: int, path: str, depth: int) -> Any:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    length = (value.bit_length() + 8) // 8
    return msgpack.ExtType(int(_Ext.INT), value.to_bytes(length, "little", signed=True))


def _lower_list(value: list[Any], path: str, depth: int) -> list[Any]:
    return [_lower(v, f"{path}[{i}]", depth) for i, v in enumerate(value)]


def _lower_plain_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(k) is str for k in value):
        return {k: _lower(v, f"{path}[{k!r}]", depth) for k, v in value.items()}
    return _lower_dict(_Ext.DICT)(value, path, depth)


def _ext(code: _Ext, lowered: Any) -> msgpack.ExtType:
    return msgpack.ExtType(int(code), _pack(lowered))


def _lower_items(code: _Ext) -> Callable[[Any, str, int], msgpack.ExtType]:
    def lower(value: Any, path: str, depth: int) -> msgpack.ExtType:
        return _ext(code, [_lower(v, f"{path}[{i}]", depth) for i, v in enumerate(value)])

    return lower


def _lower_set(code: _Ext) -> Callable[[Any, str, int], msgpack.ExtType]:
    def lower(value: Any, path: str, depth: int) -> msgpack.ExtType:
        # Sorted by their bytes: equal sets encode equally whatever the hash seed.
        items = [_lower(_check_key(v, f"{path}{{...}}"), f"{path}{{...}}", depth) for v in value]
        return _ext(code, sorted(items, key=_pack))

    return lower


def _lower_dict(code: _Ext) -> Callable[[Any, str, int], msgpack.ExtType]:
    def lower(value: Any, path: str, depth: int) -> msgpack.ExtType:
        pairs = [
            [_lower(_check_key(k, path), f"{path} key", depth), _lower(v, f"{path}[{k!r}]", depth)]
            for k, v in value.items()
        ]
        return _ext(code, pairs)

    return lower


def _check_key(key: Any, path: str) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(key, _KEY_TYPES) or (numpy is not None and isinstance(key, numpy.generic)):
        return key
    raise UnsupportedStateError(
        f"{path} has a key or set member of class {_class_name(key)}; expected None, a number, str, bytes, "
        f"tuple, frozenset or enum member"
    )


_Lower = Callable[[Any, str, int], Any]

_LOWER: dict[type, _Lower] = {
    int: _lower_int,
    list: _lower_list,
    tuple: _lower_items(_Ext.TUPLE),
    set: _lower_set(_Ext.SET),
    frozenset: _lower_set(_Ext.FROZENSET),
    dict: _lower_plain_dict,
    OrderedDict: _lower_dict(_Ext.ORDERED_DICT),
    deque: lambda v, path, depth: _ext(
        _Ext.DEQUE, [v.maxlen, [_lower(x, f"{path}[{i}]", depth) for i, x in enumerate(v)]]
    ),
    complex: lambda v, path, depth: _ext(_Ext.COMPLEX, [v.real, v.imag]),
    Namespace: lambda v, path, depth: _ext(_Ext.NAMESPACE, _lower_plain_dict(dict(vars(v)), path, depth)),
    bytearray: lambda v, path, depth: msgpack.ExtType(int(_Ext.BYTEARRAY), bytes(v)),
    PosixPath: lambda v, path, depth: _ext(_Ext.PATH, str(v)),
    range: lambda v, path, depth: _lower_parts(_Ext.RANGE, v, path, depth),
    slice: lambda v, path, depth: _lower_parts(_Ext.SLICE, v, path, depth),
}


def _lower_parts(code: _Ext, value: Any, path: str, depth: int) -> msgpack.ExtType:
    return _ext(code, [_lower(p, path, depth) for p in (value.start, value.stop, value.step)])


def _library_lowering(value: Any) -> _Lower | None:
    """For values of torch and numpy, and members of enums."""
    for module, lowering in (("torch", _torch_lowering), ("numpy", _numpy_lowering)):
        if module in sys.modules:
            found = lowering(value)
            if found is not None:
                return found
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return _lower_enum
    return None


def is_plain(value: Any) -> bool:
    """Whether it is a tensor of one of torch's own classes, whose bytes are all there is to it."""
    import torch

    kind = type(value)
    # torch 2.4 has no class for buffers.
    return kind in (torch.Tensor, torch.nn.Parameter) or kind is getattr(torch.nn, "Buffer", None)


def _torch_lowering(value: Any) -> _Lower | None:
    import torch

    if is_plain(value):
        return _lower_tensor
    return {
        torch.dtype: lambda v, path, depth: _ext(_Ext.TORCH_DTYPE, str(v)),
        torch.Size: lambda v, path, depth: _ext(_Ext.TORCH_SIZE, [int(n) for n in v]),
        torch.device: lambda v, path, depth: _ext(_Ext.TORCH_DEVICE, str(v)),
    }.get(type(value))


def _numpy_lowering(value: Any) -> _Lower | None:
    import numpy as np

    if type(value) is np.ndarray:
        return _lower_array
    if isinstance(value, np.generic):
        return lambda v, path, depth: _ext(_Ext.SCALAR, [_numpy_dtype_name(v.dtype, path), v.tobytes()])
    if isinstance(value, np.dtype):
        return lambda v, path, depth: _ext(_Ext.NUMPY_DTYPE, _numpy_dtype_name(v, path))
    return None


def _lower_enum(value: enum.Enum, path: str, depth: int) -> msgpack.ExtType:
    return _ext(_Ext.ENUM, [type(value).__module__, type(value).__qualname__, value.name])


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _lower_tensor(value: torch.Tensor, path: str, depth: int) -> msgpack.ExtType:
    import torch

    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise UnsupportedStateError(
            f"{path} is a tensor with layout {value.layout} on {value.device} (quantized: "
            f"{value.is_quantized}, nested: {value.is_nested}); expected a dense tensor with memory: "
            f"convert it before storing it"
        )
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return _ext(_Ext.TENSOR, [str(value.dtype), list(value.shape), raw])


def _lower_array(value: np.ndarray[Any, Any], path: str, depth: int) -> msgpack.ExtType:
    return _ext(_Ext.ARRAY, [_numpy_dtype_name(value.dtype, path), list(value.shape), value.tobytes()])


def _numpy_dtype_name(dtype: np.dtype[Any], path: str) -> str:
    import numpy as np

    if dtype.hasobject or dtype.names is not None or np.dtype(dtype.str) != dtype:
        raise UnsupportedStateError(
            f"{path} is a numpy value of dtype {dtype!r}; expected numbers, strings, bytes or times "
            f"(no objects, no fields): store its columns one by one"
        )
    return dtype.str


# --- decoding ------------------------------------------------------------------------------------


def _raise_ext(code: int, data: bytes) -> Any:
    """Constructor of every extension; anything outside the list is refused."""
    if code == _Ext.INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _Ext.BYTEARRAY:
        return bytearray(data)
    raise_value = _RAISE.get(code)
    if raise_value is None:
        raise DecodeError(f"found extension code {code}; this version knows {min(_Ext)}..{max(_Ext)}")
    return raise_value(_unpack(data))


def _raise_tensor(parts: Any) -> torch.Tensor:
    import torch

    name, shape, raw = parts
    dtype = _raise_torch_dtype(name)
    if prod(shape) * dtype.itemsize != len(raw):
        raise DecodeError(f"found {len(raw)} bytes for a {dtype} tensor of shape {tuple(shape)}")
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if raw:
        # bytearray: a copy of our own, so that nothing aliases (or may write to) the source buffer.
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        tensor.reshape(-1).view(torch.uint8).copy_(flat)
    return tensor


def _raise_torch_dtype(name: Any) -> torch.dtype:
    import torch

    dtype = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(f"found the tensor dtype {name!r}, which torch {torch.__version__} does not have")
    return dtype


def _raise_numpy_dtype(name: Any) -> np.dtype[Any]:
    import numpy as np

    if not isinstance(name, str) or "O" in name or "V" in name or "," in name:
        raise DecodeError(f"found the numpy dtype {name!r}; expected a plain one")
    return np.dtype(name)


def _raise_array(parts: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    name, shape, raw = parts
    return (
        np.frombuffer(bytearray(raw), dtype=_raise_numpy_dtype(name)).reshape(shape)
        if raw
        else np.empty(shape, dtype=_raise_numpy_dtype(name))
    )


def _raise_scalar(parts: Any) -> Any:
    import numpy as np

    name, raw = parts
    dtype = _raise_numpy_dtype(name)
    if dtype.itemsize == 0:  # an empty numpy string or bytes
        return np.zeros((), dtype=dtype)[()]
    return np.frombuffer(bytearray(raw), dtype=dtype)[0]


def _raise_torch_size(parts: Any) -> torch.Size:
    import torch

    return torch.Size(parts)


def _raise_torch_device(name: Any) -> torch.device:
    import torch

    return torch.device(str(name))


def _raise_enum(parts: Any) -> enum.Enum:
    # Looked up only in modules this process has imported by itself, and in plain namespaces, so that
    # neither an import nor a module's __getattr__ runs on behalf of the bytes.
    module, qualname, name = parts
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, enum.EnumMeta) or name not in found.__members__:
        raise DecodeError(
            f"found the enum member {module}.{qualname}.{name}, which this process does not have; import "
            f"{module} before decoding, or store plain values"
        )
    member: enum.Enum = found.__members__[name]
    return member


_RAISE: dict[int, Callable[[Any], Any]] = {
    _Ext.TUPLE: tuple,
    _Ext.COMPLEX: lambda parts: complex(*parts),
    _Ext.SET: set,
    _Ext.FROZENSET: frozenset,
    _Ext.DICT: lambda pairs: {k: v for k, v in pairs},
    _Ext.ORDERED_DICT: lambda pairs: OrderedDict((k, v) for k, v in pairs),
    _Ext.TENSOR: _raise_tensor,
    _Ext.ARRAY: _raise_array,
    _Ext.SCALAR: _raise_scalar,
    _Ext.TORCH_DTYPE: _raise_torch_dtype,
    _Ext.TORCH_SIZE: _raise_torch_size,
    _Ext.TORCH_DEVICE: _raise_torch_device,
    _Ext.PATH: Path,
    _Ext.ENUM: _raise_enum,
    _Ext.NUMPY_DTYPE: _raise_numpy_dtype,
    _Ext.DEQUE: lambda parts: deque(parts[1], parts[0]),
    _Ext.RANGE: lambda parts: range(*parts),
    _Ext.SLICE: lambda parts: slice(*parts),
    _Ext.NAMESPACE: lambda parts: Namespace(**parts),
}
