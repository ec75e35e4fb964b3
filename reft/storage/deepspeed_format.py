"""DeepSpeed's checkpoint files, written from a version instead of from a live engine.

During training each rank records once what ``engine.save_checkpoint`` would write, as a
*template* (:mod:`reft.storage.template`). Every version contains the template in its host block
(the encoded host state of a rank). Later a process that has the images and host blocks of a
version, such as a tool after the job's end, fills the templates in. This gives the files that
``save_checkpoint`` would have written at that step; DeepSpeed loads them without reft.

Every rank records only the files that it would write itself: the first replica the model files,
each replica its ZeRO partition. A version is recoverable only with the host block of every rank,
so the template of a lost node is available wherever its state is.

Next to DeepSpeed's files, each rank has a file with its host state (random state, data position,
buffers). DeepSpeed ignores this file; reft needs it to restore training bit for bit (P8).
"""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from reft.durable import whole_file
from reft.errors import PersistError, UnsupportedStateError
from reft.grid import Coordinate
from reft.state import codec
from reft.state.adapters import adapter_for
from reft.state.catalogue import SectionImage
from reft.state.codec import class_path
from reft.storage.template import HostState, ReadSection, Rebuilder, Resolve, TemplateBuilder
from reft.storage.template import Path as Keys

TEMPLATE_FORMAT = 1
HOST_FILE_MAGIC = b"REFTHOST1"
# Megatron's file next to ``latest``, which contains the iteration of the newest checkpoint.
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
_NOWHERE = Path("/nonexistent/reft-template")
_TAG = "template"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCHEDULES = ("data_sampler", "random_ltd")
# Keys under which the optimizer wrapper's state dict is stored: in the model file without ZeRO,
# and in the ZeRO file.
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
# Keys of the torch optimizer's state dict within the wrapper's state dict.
_INNER_KEYS = ("optimizer_state_dict", "base_optimizer_state")


@dataclass(frozen=True)
class Template:
    """The checkpoint files of one rank without the tensors' bytes."""

    # Tree of template nodes for each file, by file name within the tag directory
    files: Mapping[str, list[Any]]
    # Names of the files whose top level includes the user's client state
    client_files: tuple[str, ...]
    # Whether this rank writes DeepSpeed's ZeRO scripts next to the tag directory
    recovery_scripts: bool
    shape: bytes  # Structure that the host state must have (`read_shape`), encoded
    versions: Mapping[str, str]  # Versions of DeepSpeed and torch in the training job

    def encode(self) -> bytes:
        content = {"format": TEMPLATE_FORMAT, **vars(self), "client_files": list(self.client_files)}
        return zlib.compress(codec.encode(content), 6)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Template:
        if not data:
            raise PersistError(
                "the version carries no checkpoint template: the engine holds something reft "
                "cannot write as a DeepSpeed checkpoint (the trainer's log names it). The rest is "
                "resumed from memory"
            )
        try:
            content = codec.decode(zlib.decompress(data))
            found = content["format"]
            if found > TEMPLATE_FORMAT:
                raise PersistError(
                    f"the template has format {found}; this reft reads format {TEMPLATE_FORMAT}"
                )
            names = ("files", "recovery_scripts", "shape", "versions")
            return cls(
                client_files=tuple(content["client_files"]),
                **{name: content[name] for name in names},
            )
        except (zlib.error, codec.DecodeError, KeyError, TypeError) as error:
            raise PersistError(f"the checkpoint template cannot be read: {error!r}") from error


# --- capturing ------------------------------------------------------------------------------------


def capture_template(
    engine: Any, images: tuple[SectionImage, SectionImage], host_state: HostState
) -> bytes:
    """Record what ``engine.save_checkpoint`` would write on this rank.

    No file is written, no tensor copied and no collective entered, so a rank can call this alone
    between two steps. One call is enough for each layout.

    Args:
        engine: DeepSpeed's engine.
        images: images of the replicated and of the owned section.
        host_state: host state captured at the same step.

    Returns:
        The encoded template.

    Raises:
        UnsupportedStateError: the engine holds something that a template cannot represent.
    """
    import deepspeed

    recorded, model_file, has_scripts = _record(engine)
    per_step, given = _PerStepValues(engine, host_state), client_state(host_state)
    # Drop methods: since 0.18 DeepSpeed saves the module's ``universal_checkpoint_info``, which
    # is a method of Megatron's models and is then overwritten by the client state.
    if model := recorded.get(model_file):
        recorded[model_file] = {k: v for k, v in model.items() if k not in given or not callable(v)}
    files = {
        name: TemplateBuilder(name, images, per_step.resolver(content), host_state).build(content)
        for name, content in recorded.items()
    }
    template = Template(
        files=files,
        client_files=tuple(n for n in files if n == model_file),
        recovery_scripts=has_scripts,
        shape=read_shape(host_state),
        versions={"deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)},
    )
    return template.encode()


class _RecordingEngine:
    """Stands in for DeepSpeed's checkpoint engine, and records the calls of ``save``."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.saved: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing."""

    def create(self, info: Any) -> None:
        """Does nothing."""

    def save(self, state_dict: Any, path: str) -> None:
        self.saved.append((path, state_dict))

    def commit(self, info: Any) -> bool:
        return True


def _record(engine: Any) -> tuple[dict[str, Any], str, bool]:
    """Record what the engine would save, without saving it.

    Returns:
        State dict by file name, the name of the model's file, and whether DeepSpeed would copy its
        recovery scripts.
    """
    if getattr(engine, "has_moe_layers", False):
        raise UnsupportedStateError(
            "the model has mixture-of-experts layers, whose checkpoints are distributed by expert; "
            "reft writes checkpoints of dense models only"
        )
    from deepspeed.runtime.pipe import module as pipe
    from deepspeed.utils import logger as deepspeed_logger

    recorder = _RecordingEngine(engine.checkpoint_engine)
    scripts: list[Any] = []
    with ExitStack() as swapped:
        swapped.enter_context(_attribute(engine, "checkpoint_engine", recorder))
        swapped.enter_context(_attribute(engine, "_copy_recovery_script", scripts.append))
        swapped.enter_context(_attribute(engine, "_curr_ckpt_path", None))
        swapped.enter_context(_own_form(engine))
        swapped.enter_context(_attribute(engine, "module_state_dict", _released(engine)))
        swapped.enter_context(_attribute(engine, "_get_param_fragment_func", _fragment))
        swapped.enter_context(_attribute(pipe, "clone_tensors_for_torch_save", _detach_all))
        # Otherwise DeepSpeed would log that it saves a checkpoint
        swapped.enter_context(_attribute(deepspeed_logger, "disabled", True))
        engine._save_checkpoint(str(_NOWHERE), _TAG, client_state={})
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint(str(_NOWHERE), _TAG)
        model_file = os.path.basename(engine._get_ckpt_name(str(_NOWHERE), _TAG))
    return (
        {_relative(path): state_dict for path, state_dict in recorder.saved},
        model_file,
        bool(scripts),
    )


def _relative(path: str) -> str:
    name = os.path.relpath(path, _NOWHERE / _TAG)
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise UnsupportedStateError(
            f"DeepSpeed would write {path}; expected a file directly in the tag directory "
            f"{_NOWHERE / _TAG}"
        )
    return name


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Shadow an attribute of an instance within the ``with`` block."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _own_form(engine: Any) -> AbstractContextManager[None]:
    """Use Megatron's own form of the module's state dict, as Megatron's ``save_checkpoint``
    does.

    Megatron's models load only that form. Pipeline models have no such form.
    """
    own = getattr(engine.module, "state_dict_for_save_checkpoint", None)
    if own is None or hasattr(engine, "grid"):
        return nullcontext()

    def state_dict(destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        return own(prefix=prefix, keep_vars=keep_vars)

    return _attribute(engine.module, "state_dict", state_dict)


def _released(engine: Any) -> Callable[..., Any]:
    """Return the engine's ``module_state_dict`` with empty parameters at ZeRO-3, as in DeepSpeed's
    files.

    Without this, parameters that are gathered between steps (persistent ones, and those that the
    script has gathered) would not be empty.
    """
    original = engine.module_state_dict

    def module_state_dict(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        for name, p in engine.module.named_parameters(remove_duplicate=False):
            if hasattr(p, "ds_tensor") and name in found:
                found[name] = torch.empty(0, dtype=p.dtype)
        return found

    return module_state_dict


def _fragment(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a frozen parameter without copying it, because a template needs
    the original tensor.

    Replaces DeepSpeed's function, which copies the part to the host.
    """
    return getattr(parameter, "ds_tensor", parameter).detach()


def _detach_all(item: Any, device: Any = None) -> Any:
    """Return a pipeline's state with the original tensors, because a template needs them.

    Replaces DeepSpeed's function, which clones the tensors. The containers are rebuilt as
    DeepSpeed does, because this shows in the file: a module's ``_metadata`` is dropped.
    """
    if isinstance(item, torch.Tensor):
        return item.detach()
    if isinstance(item, (list, tuple)):
        return type(item)(_detach_all(v) for v in item)
    if isinstance(item, dict):
        return type(item)({k: _detach_all(v) for k, v in item.items()})
    return item


# --- values that change every step, and their place in the host state -----------------------------
#
# A value for which the code below finds no place in the host state is assumed to stay the same as
# long as the layout does. A module's state dict may hold only tensors: any other value could change
# unnoticed, so it is refused.


def client_state(host_state: HostState) -> dict[str, Any]:
    return dict(host_state["client"] or {})


def find_tracker(host_state: HostState) -> bytes | None:
    """Return the content of Megatron-DeepSpeed's tracker file for a version; None for other
    programs.
    """
    client = client_state(host_state)
    iteration = client.get("iteration")
    is_megatrons = isinstance(client.get("args"), Namespace) and "checkpoint_version" in client
    return str(iteration).encode() if is_megatrons and isinstance(iteration, int) else None


def read_shape(host_state: HostState) -> bytes:
    """Return the structure of a host state (names of its values), which must match that in the
    template."""
    adapter = host_state["adapter"]
    facts = [adapter["wrapper"], adapter["optimizer"], adapter["layout"]]
    groups = [list(group) for group in adapter["param_groups"]]
    return codec.encode([*facts, groups, host_state["lr_scheduler"] is None])


class _PerStepValues:
    """Finds, for each value that a live engine saves, the path of the same value in the host
    state of the step."""

    def __init__(self, engine: Any, host_state: HostState) -> None:
        self._adapter: Mapping[str, Any] = host_state["adapter"]
        self._buffers = {
            _tensor_key(b): name for name, b in engine.module.named_buffers() if b.numel()
        }
        self._positions = _positions(engine)

    def resolver(self, content: Any) -> Resolve:
        """Return the function that finds such paths for one file's state dict."""
        if isinstance(content, dict):
            if "global_steps" in content and "module" in content:
                return self._model_file
            if set(content) & set(_OPTIMIZER_KEYS) and "ds_version" in content:
                return self._zero_file
        return self._module

    def _model_file(self, path: Keys, value: Any) -> Keys | None:
        if path and path[0] == "module":
            return self._module(path[1:], value)
        if len(path) == 1 and path[0] in _COUNTERS:
            return ("engine", path[0])
        if len(path) == 1 and value is not None and path[0] in ("lr_scheduler", *_SCHEDULES):
            return path if path[0] == "lr_scheduler" else ("schedules", path[0])
        return self._zero_file(path, value)

    def _zero_file(self, path: Keys, value: Any) -> Keys | None:
        return self._wrapper(path[1:]) if path and path[0] in _OPTIMIZER_KEYS else None

    def _module(self, path: Keys, value: Any) -> Keys | None:
        if isinstance(value, torch.Tensor):
            name = self._buffers.get(_tensor_key(value)) if value.numel() else None
            return None if name is None else ("buffers", name)
        if value is not None and not isinstance(value, dict) and "_metadata" not in path:
            raise UnsupportedStateError(
                f"the module's state dict has {'.'.join(str(k) for k in path)} of class "
                f"{class_path(value)}; expected tensors only, as the snapshot holds nothing else "
                "of a module: register it as a buffer, or return it from client_state"
            )
        return None

    def _wrapper(self, path: Keys) -> Keys | None:
        """Return ``path`` within the state dict of DeepSpeed's wrapper, or of a torch optimizer
        itself.
        """
        if not path:
            return None
        if path[0] in _INNER_KEYS:
            return self._inner(path[1:])
        # Only ZeRO-1 with elastic_checkpoint has this
        if path[0] == "base_optimizer_state_step":
            return ("adapter", "param_groups", 0, "step")
        if len(path) == 1 and path[0] in self._adapter["attributes"]:
            return ("adapter", "attributes", path[0])
        scale = path[1] if path[0] == "loss_scaler" and len(path) == 2 else path[0]
        if len(path) <= 2 and scale in self._adapter["loss_scale"]:
            return ("adapter", "loss_scale", scale)
        return self._inner(path)

    def _inner(self, path: Keys) -> Keys | None:
        """Return ``path`` within the state dict of a torch optimizer."""
        match path:
            case ("param_groups", group, key) if key != "params":
                return ("adapter", "param_groups", group, key)
            case (int(group), key):  # elastic_checkpoint has one dict per parameter group
                return self._parameter_value(group, 0, key)
            case ("state", number, key) if number in self._positions:
                return self._parameter_value(*self._positions[number], key)
            case ("state", str(key)):
                return ("adapter", "extra", key)
        return None

    def _parameter_value(self, group: int, position: int, key: Any) -> Keys | None:
        if key not in self._adapter["state"][group][position]:
            return None  # A tensor, which is in the images
        return ("adapter", "state", group, position, key)


def _positions(engine: Any) -> dict[int, tuple[int, int]]:
    """Return the group and the position in it of each parameter, by the parameter's number in
    ``Optimizer.state_dict``."""
    numbers: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for g, i, param in adapter_for(engine).state.params():
        if id(param) not in seen:
            numbers[len(seen)] = (g, i)
            seen.add(id(param))
    return numbers


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


# --- rebuilding -----------------------------------------------------------------------------------


# Length in bytes and xxh3_64 of a file, computed while the file was written
WrittenFile = tuple[int, int]


def write_checkpoint(
    template: Template,
    read: ReadSection,
    host_state: HostState,
    directory: Path,
    coordinate: Coordinate,
) -> dict[str, WrittenFile]:
    """Write one rank's files of a version into a tag directory: DeepSpeed's files, and the host
    state.

    A file appears under its name only when it is complete and on storage.

    Args:
        template: the rank's template.
        read: returns bytes of the rank's images; tensors to be written are views of these bytes.
        host_state: the rank's host state in the version.
        directory: the tag directory.
        coordinate: the rank's coordinate.

    Returns:
        Length and checksum of each file, by name.

    Raises:
        PersistError: the host state does not match the template.
    """
    if read_shape(host_state) != template.shape:
        raise PersistError(
            "the host state has other values than the checkpoint template was made for (parameter "
            "groups, optimizer state or scheduler were added since); the next version of another "
            "layout renews it"
        )
    written = {}
    for name, node in template.files.items():
        state_dict = Rebuilder(read, host_state).build(node)
        if name in template.client_files:
            state_dict.update(client_state(host_state))
        written[name] = _write_file(
            directory / name, lambda file, sd=state_dict: torch.save(sd, file)
        )
        del state_dict
    name = host_file_name(coordinate)
    return {**written, name: write_host_file(directory / name, host_state)}


class _HashingFile:
    """A file opened for writing that counts and hashes the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = xxhash.xxh3_64()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        self.nbytes += view.nbytes
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def _write_file(path: Path, write: Any) -> WrittenFile:
    with whole_file(path, buffering=2**20) as file:
        hashing = _HashingFile(file)
        write(hashing)
    return hashing.nbytes, hashing.digest.intdigest()


def write_recovery_scripts(directory: Path) -> None:
    """Copy the scripts that DeepSpeed puts next to its ZeRO checkpoints."""
    import deepspeed.utils

    source = Path(deepspeed.utils.__file__).parent
    directory.mkdir(exist_ok=True)
    for name in _RECOVERY_SCRIPTS:
        if (source / name).is_file():
            target = directory / name
            shutil.copyfile(source / name, target)
            target.chmod(target.stat().st_mode | stat.S_IEXEC)


# --- host files -----------------------------------------------------------------------------------


def host_file_name(coordinate: Coordinate) -> str:
    """Return the name of the file with a rank's host state in a tag directory. DeepSpeed's file
    patterns do not match this name.
    """
    return f"reft_host-{coordinate}.msgpack"


def write_host_file(path: Path, host_state: HostState) -> WrittenFile:
    """Write a rank's host state: magic number, checksum, encoded state.

    The file appears under its name only when it is complete and on storage.
    """
    body = codec.encode(dict(host_state))
    content = HOST_FILE_MAGIC + xxhash.xxh3_64_digest(body) + body
    return _write_file(path, lambda file: file.write(content))


def read_host_file(path: Path) -> dict[str, Any]:
    """Read a rank's host state and verify its checksum (P5).

    Raises:
        PersistError: the file is damaged.
    """
    data = path.read_bytes()
    body = data[len(HOST_FILE_MAGIC) + 8 :]
    digest = data[len(HOST_FILE_MAGIC) : len(HOST_FILE_MAGIC) + 8]
    if not data.startswith(HOST_FILE_MAGIC) or xxhash.xxh3_64_digest(body) != digest:
        raise PersistError(
            f"{path}: {len(data)} bytes that are not a whole host file of reft; restore it from a "
            "copy, or remove it to resume without random state and data position"
        )
    state: dict[str, Any] = codec.decode(body)
    return state
