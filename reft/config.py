"""The ``reft`` block of the DeepSpeed JSON: its keys, parsing and error messages.

Unknown keys and impossible combinations are refused with a message that says what to write.
An absent block, or ``"enabled": false``, leaves the job untouched (promise P10).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from reft.env import ENV_JOB_ID, ENV_MEMORY_DIR, ENV_PROFILE
from reft.errors import ConfigError
from reft.naming import BLOCK_NAME, JOB_ID, make_run_name
from reft.protect.codes import short_form

if TYPE_CHECKING:  # Imports numpy, which a job without a ``reft`` block must not import (P10)
    from reft.protect.codes import Scheme

logger = logging.getLogger(__name__)

AUTO = "auto"


class ConfigBlock(BaseModel):
    """The ``reft`` block or a part of it. Unknown keys are refused, and objects are immutable.

    The meaning of a key is its ``description``, or the text below it; both are shown to users.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _expand_variables(path: object) -> object:
    """Replace environment variables in a path, which may have other values on other nodes."""
    if not isinstance(path, str):
        return path
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise ValueError(
            f"{path!r} names an environment variable that is not set here; set it for all ranks"
        )
    return expanded


class PersistConfig(ConfigBlock):
    """Low-frequency checkpoints on storage, written from host memory in the background."""

    dir: Annotated[Path, BeforeValidator(_expand_variables)] | None = None
    """directory that every node sees, or a directory on each node's own disk; $NAME in it is the
    value of an environment variable; null: nothing is written"""
    interval_steps: int | Literal["auto"] = 0
    """write the newest committed version every this many steps; 0: only on SIGTERM; 'auto': chosen
    while the job runs, from how often memory fails and what writing costs"""
    max_overhead: float = Field(0.035, gt=0, le=1)
    """fraction of the training time that storage may cost, for 'auto'"""
    max_lost_steps: int | None = Field(None, ge=2)
    """with 'auto', maximum steps lost in a failure that memory does not survive; overrides
    max_overhead; null: twice the current interval"""
    node_mtbf_days: float = Field(150.0, gt=0)
    """with 'auto', mean time between failures of a node; failures that the job has seen are
    added"""
    survival: float | None = Field(None, gt=0, lt=1)
    """with 'auto', wanted probability (0.999) that memory alone carries the job from one checkpoint
    to the next; null: the interval that loses least time"""
    keep: int = Field(2, ge=1)
    """newest persisted checkpoints to keep"""
    keep_epochs: int = Field(0, ge=0)
    """checkpoints at the ends of epochs to keep as well, for loaders that reft follows; 0: none is
    written for an epoch's end"""
    export_at_end: Path | None = None
    """when training finishes or is asked to stop, export the newest version to this directory in
    DeepSpeed's checkpoint format, as 'reft persist' does"""
    timeout_secs: float = Field(600.0, gt=0)
    """give up a checkpoint when a peer's part has been missing for this long"""
    local: bool = False
    """whether every node has a directory of its own there; found out at the start of the job"""

    @property
    def fixed_steps(self) -> int:
        """The configured interval in steps; 0 if it is "auto"."""
        return 0 if self.interval_steps == AUTO else int(self.interval_steps)

    @property
    def adapts(self) -> bool:
        """Whether reft chooses the interval while the job runs."""
        return self.interval_steps == AUTO

    @model_validator(mode="after")
    def _check(self) -> PersistConfig:
        if self.dir is not None and self.dir.parts[0].endswith(":"):
            raise ValueError(
                f"persist.dir is {str(self.dir)!r}, a URL; write the path of a directory that is "
                "mounted on every node"
            )
        if self.fixed_steps < 0:
            raise ValueError(
                f"persist.interval_steps is {self.fixed_steps}; write a number of steps, 0 to "
                "write only "
                'when the job is asked to stop, or "auto"'
            )
        keys = ("max_overhead", "max_lost_steps", "node_mtbf_days", "survival")
        given = [k for k in keys if getattr(self, k) != PersistConfig.model_fields[k].default]
        if given and not self.adapts:
            raise ValueError(
                f'persist.{given[0]} belongs to "interval_steps": "auto"; found '
                f'"interval_steps": {self.interval_steps}. Write "auto", or remove it'
            )
        return self


# Suffix of a protection's name. With it, ring peers recompute each other's ZeRO partitions instead
# of receiving copies (asynchronous optimizer recomputing, AOR)
AOR = "+aor"


class FaultPoint(StrEnum):
    """Points at which a test may make a rank fail.

    A rank reaches each point once per version, or per restore; those of parity only if parities are
    computed. ``during`` means in the middle of the activity.
    """

    BEFORE_COPY = "before_copy"
    DURING_COPY = "during_copy"
    BEFORE_PARITY = "before_parity"
    DURING_PARITY = "during_parity"
    BEFORE_SEAL = "before_seal"
    AFTER_SEAL = "after_seal"
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"
    DURING_STEP = "during_step"
    DURING_RECOVERY = "during_recovery"
    DURING_PERSIST = "during_persist"
    DURING_SWITCH = "during_switch"


class Variant(StrEnum):
    """When the bytes of a version are copied. All variants but NONE commit the same versions.

    - HAS: preferably in the idle time of the pipeline (hierarchical asynchronous snapshotting).

    The others exist as baselines for measurements:

    - HOST: a thread copies at once, whatever the device does.
    - HOST_DEVICE: device copies are queued at once, whatever the schedule; on a CPU the same as
      HOST.
    - BLOCKING: training waits for the copy.
    - INTER_NODE: the whole version is also sent to a peer (as Gemini does).
    - NONE: no versions are taken.
    """

    HAS = "has"
    HOST = "host"
    HOST_DEVICE = "host_device"
    BLOCKING = "blocking"
    INTER_NODE = "inter_node"
    NONE = "none"


class FaultConfig(ConfigBlock):
    """One injected fault, for tests and demonstrations."""

    point: FaultPoint = Field(description="where the rank fails")
    step: int = Field(
        ge=0, description="global step of the version being taken (recovery: restored)"
    )
    pp: int | None = Field(None, ge=0, description="only on this pipeline stage; null means any")
    dp: int | None = Field(None, ge=0, description="only on this replica; null means any")
    tp: int | None = Field(None, ge=0, description="only on this tensor slice; null means any")
    incarnation: int | None = Field(1, ge=1)
    """only in this incarnation of the job (1 is the first start); null means any"""
    action: Literal["kill", "kill_node", "raise"] = "kill"
    """SIGKILL of the process, of everything on its node, or an exception"""


class HasConfig(ConfigBlock):
    """When versions may be copied: limits for copies in and outside of the pipeline's idle time."""

    windows: Literal["profiled", "analytic", "paper"] = "profiled"
    """where idle times come from: measured in the running job, the formulas of 1F1B, or Algorithm 1
    of the paper"""
    chunk_bytes: int = Field(256 * 2**10, ge=4096)
    """unit of copying; when a window closes, training waits for at most one chunk"""
    compute_share: float | None = Field(None, ge=0, le=1)
    """largest share of compute time in which copies may run; null: all of it on a device or with
    an idle core, otherwise none"""
    separate_links: bool = False
    """training and snapshots use different links (NVLink and PCIe), so copies may also run during
    communication (tier 3)"""
    overflow: Literal["auto", "stall", "interval", "staging"] = "auto"
    """for bytes that do not fit before the optimizer step: 'stall' makes it wait, 'interval' takes
    versions less often to keep max_overhead, 'staging' copies them to free device memory and to the
    host in the next steps; 'auto' is 'stall', or with "interval_steps": "auto" on devices without
    pipeline stages the cheaper of 'stall' and 'staging', as measured"""
    staging_fallback: Literal["stall", "interval"] = "interval"
    """what 'staging' does on CPUs, or if the device has no free memory"""
    max_overhead: float = Field(0.03, gt=0, le=1)
    """part of the training time that versions may cost, for 'interval' and for "interval_steps":
    "auto" """


class ProfileConfig(ConfigBlock):
    """Settings of the profiler, which measures where the devices of a running job wait."""

    steps: int = Field(0, ge=0, description="number of steps to profile once; 0 turns it off")
    warmup_steps: int = Field(5, ge=0, description="steps to skip before")
    dir: Path = Path("reft-profile")
    """where rank 0 writes profile.json, trace.json (Chrome, Perfetto) and profile.png"""
    pipelines: int = Field(4, ge=1)
    """pipelines (data x tensor parallel) whose instructions are all collected"""
    then: Literal["go_on", "exit"] = "go_on"
    """after measuring, let the job go on, or end it with exit code 0"""


class MetricsConfig(ConfigBlock):
    """Metrics for Prometheus, served by each node's daemon (needs the extra reft-ckpt[metrics])."""

    port: int = Field(
        0, ge=0, lt=2**16, description="TCP port, the same on every node; 0 serves none"
    )
    host: str = "127.0.0.1"
    """address to listen on; everyone who reaches it can read the metrics, without a secret"""


class VerifyConfig(ConfigBlock):
    """Which checks a version must pass before it is committed."""

    peers: Literal["off", "rotate", "full"] = "rotate"
    """compare what must be equal on all data-parallel peers: 'rotate': 1/61 of the state per
    version, everything once in 61 versions; 'full': everything with each version"""
    on_difference: Literal["report", "stop", "rollback"] = "report"
    """where peers differ no version is committed; 'report' trains on, 'stop' ends the job,
    'rollback' restarts it from the newest version"""
    suspects: int = Field(3, ge=0)
    """a version with a NaN or an infinity in weights or optimizer state is not committed; after so
    many in a row the job restarts from the newest version, or stops if nothing was committed
    since this start; 0 disables the check"""


class ElasticConfig(ConfigBlock):
    """How launchers may change a running job's set of nodes without being asked."""

    wait_secs: float | None = Field(None, gt=0)
    """with --nnodes MIN:MAX, how long the remaining nodes wait for a replacement before they go on
    without one; null: last_call_timeout of --rdzv-conf, 10"""


class ReftConfig(ConfigBlock):
    """Settings of reft: the ``reft`` block of the DeepSpeed configuration."""

    enabled: bool = Field(False, description="switch reft on")
    preset: Literal["short", "middle", "long"] | None = None
    """settings for a job of hours ('short'), days ('middle') or weeks ('long'), which other keys
    override (docs/planning.md)"""
    job_id: str | None = Field(None, pattern=f"^{JOB_ID.pattern}$")
    """name of the job's memory; null: the launcher's run id, else a name made from user, directory,
    program and arguments; REFT_JOB_ID, which 'reft launch' sets, overrides it"""
    memory_dir: Path = Path(f"/dev/shm/reft-{os.geteuid()}")
    """tmpfs directory for versions, one per node and user; REFT_MEMORY_DIR, which 'reft launch'
    sets, overrides it"""
    interval_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """take a version every this many optimizer steps; 'auto': as often as has.max_overhead allows,
    measured while the job runs"""
    max_lost_steps: int | None = Field(None, ge=4)
    """with "interval_steps": "auto", maximum steps lost in a failure that memory survives;
    overrides max_overhead; null: twice the current interval"""
    variant: Variant = Variant.HAS
    """when to copy: 'has' in the pipeline's idle time; for comparison only: 'host' at once, by a
    thread; 'host_device' at once, by device copies; 'blocking' while training waits; 'inter_node'
    also sends the whole state to a peer; 'none' never"""
    has: HasConfig = Field(default_factory=HasConfig, description="settings of variant 'has'")
    protection: Annotated[str, BeforeValidator(short_form)] = "arc"
    """redundancy of replicated state: 'arc' copies the shards of ring successors, 'aec' stores a
    parity (XOR), 'rs:K' K parities (Reed-Solomon) of every stripe, 'arc+aec' both, 'none' nothing.
    ZeRO partitions and host state go to ring peers; with '+aor' added the peers recompute the
    partitions from the gradients. 'auto' chooses at the start the cheapest that fits the memory and
    survives 'tolerance' node losses ('auto+aor' recomputes). A mapping such as {scheme: rs,
    parities: 2,
    recompute: true} means 'rs:2+aor' (docs/protection.md)"""
    tolerance: int = Field(1, ge=0)
    """node losses that every sharding group must survive: 'auto' chooses by it, and a job on
    several nodes that survives fewer does not start"""
    allow_unprotected: bool = False
    """start on several nodes even if fewer losses than 'tolerance' are survived"""
    strict: bool = False
    """turn warnings about what would make a recovery impossible or different into an error at the
    first step"""
    copies: int = Field(1, ge=0, description="redundant copies of every shard (k) under 'arc'")
    arenas: int | None = Field(None, ge=2, le=8)
    """versions in memory per rank; null: 2, or 3 with persist.dir, so that writing to storage
    delays no version"""
    block_bytes: int = Field(4 * 2**20, ge=4096)
    """bytes of a block, the unit of checksum and transfer"""
    host_state_bytes: int = Field(2**20, ge=2**16)
    """bytes reserved per rank for RNG states, schedulers, counters and client state"""
    memory_limit_bytes: int | None = Field(None, ge=1)
    """most host memory reft may reserve per node; null: what is free"""
    memory_margin_bytes: int | None = Field(None, ge=0)
    """when a node has less free host memory than this, versions are kept more cheaply, step by
    step, until there is room again; null: 1/64 of the memory directory's file system, at most 1
    GiB"""
    transport: Literal["sockets", "mpi"] = "sockets"
    """carries votes, blocks and recoveries between ranks: 'sockets', authenticated connections of
    reft, or 'mpi', the fabric of a job started by 'reft mpi-run' (extra reft-ckpt[mpi])"""
    hang_factor: float = Field(10.0, ge=0, le=10_000)
    """a trainer hangs, and all trainers restart, when a step makes no progress for this many times
    the longest of its last 64 steps; 0 switches hang detection off"""
    hang_timeout_secs: float = Field(600.0, gt=0, le=1_000_000)
    """the same limit where no step is measured: the first two steps, an evaluation, a save, or the
    script's own code between two steps (docs/monitoring.md)"""
    commit_timeout_secs: float = Field(1800.0, gt=0)
    """give up on a commit when a peer is silent for so long"""
    grace_secs: float = Field(25.0, gt=0)
    """after SIGTERM or Ctrl-C: time to finish the step, commit and persist"""
    accept_changes: tuple[str, ...] = ()
    """differences between stored state and job to accept, as the refusal names them:
    "config.optimizer.params.lr", or "config" for the whole configuration"""
    persist: PersistConfig = Field(
        default_factory=PersistConfig, description="checkpoints on storage"
    )
    profile: ProfileConfig = Field(
        default_factory=ProfileConfig, description="measure idle times once"
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="metrics, by each daemon"
    )
    verify: VerifyConfig = Field(
        default_factory=VerifyConfig, description="looked at before a commit"
    )
    elastic: ElasticConfig = Field(default_factory=ElasticConfig, description="changing nodes")
    faults: tuple[FaultConfig, ...] = Field((), description="injected faults, for tests")

    @model_validator(mode="after")
    def _check(self) -> ReftConfig:
        if self.block_bytes % 4096:
            raise ValueError(
                f"block_bytes is {self.block_bytes}; write a multiple of 4096, for example "
                f"{max(4096, self.block_bytes // 4096 * 4096)}"
            )
        if self.has.chunk_bytes % 64:
            raise ValueError(
                f"has.chunk_bytes is {self.has.chunk_bytes}; write a multiple of 64, for example "
                f"{self.has.chunk_bytes // 64 * 64}"
            )
        if self.variant is not Variant.HAS and self.has.model_fields_set:
            raise ValueError(
                f'"variant": "{self.variant.value}" does not use "has": '
                f'{{"{sorted(self.has.model_fields_set)[0]}": ...}}; remove it, or write '
                '"variant": "has"'
            )
        if self.variant is Variant.NONE and self.persist.dir is not None:
            raise ValueError(
                '"variant": "none" takes no snapshots, so there is nothing to persist; remove '
                '"persist", or '
                "choose another variant"
            )
        from reft.protect.codes import Scheme

        scheme = Scheme() if self.chooses else Scheme.parse(self._replicated_protection)
        self._check_aor()
        if "copies" in self.model_fields_set and self.chooses:
            raise ValueError(
                f'"protection": "{self.protection}" chooses the number of copies itself; remove '
                '"copies", '
                'and write "tolerance": the node losses to survive'
            )
        if "copies" in self.model_fields_set and self._replicated_protection not in ("arc", "none"):
            raise ValueError(
                '"copies" belongs to "protection": "arc"; found "protection": '
                f'"{self.protection}". Write '
                f'the number into it, for example "arc:{max(1, self.copies)}+aec", and remove '
                '"copies"'
            )
        if not scheme.designed:
            raise ValueError(
                f'"protection": "{self.protection}" survives no more than one of its parts; write '
                f'"{self.protection.removeprefix("naive:")}"'
            )
        if (
            self._replicated_protection == "none"
            and "copies" in self.model_fields_set
            and self.copies
        ):
            raise ValueError(
                f'"protection": "none" with "copies": {self.copies} contradict each other; remove '
                f'"copies", or write "protection": "arc"'
            )
        if self._replicated_protection == "arc" and self.copies == 0:
            raise ValueError(
                '"copies": 0 protects nothing; write "protection": "none" if you mean it'
            )
        self._check_auto_persist()
        if self.max_lost_steps is not None and not self.adapts:
            raise ValueError(
                f'max_lost_steps belongs to "interval_steps": "auto"; found "interval_steps": '
                f'{self.interval_steps}. Write "auto", or remove it'
            )
        if self.persist.fixed_steps % self.version_steps:
            raise ValueError(
                f"persist.interval_steps is {self.persist.interval_steps}, but snapshots exist "
                f"only every {self.version_steps} steps; write a multiple of {self.version_steps}"
            )
        return self

    @property
    def adapts(self) -> bool:
        """Whether reft chooses the interval of versions while the job runs."""
        return self.interval_steps == AUTO

    @property
    def version_steps(self) -> int:
        """Shortest interval of versions, in steps: the configured one, or 1 if it is "auto"."""
        return 1 if self.interval_steps == AUTO else int(self.interval_steps)

    @property
    def scheme(self) -> Scheme:
        """The configured protection scheme.

        Raises:
            ConfigError: the protection is ``auto``, which names no scheme.
        """
        from reft.protect.codes import Scheme

        text = self._replicated_protection
        return Scheme(self.copies) if text == "arc" else Scheme.parse(text)

    @property
    def chooses(self) -> bool:
        """Whether reft chooses the protection at the start of the job (``auto``)."""
        return self._replicated_protection == AUTO

    @property
    def recompute(self) -> bool:
        """Whether ring peers recompute ZeRO partitions instead of receiving them (``+aor``)."""
        return self.protection.endswith(AOR)

    @property
    def _replicated_protection(self) -> str:
        return self.protection.removesuffix(AOR)

    def _check_auto_persist(self) -> None:
        for key in ("interval_steps", "keep_epochs", "export_at_end"):
            if getattr(self.persist, key) and self.persist.dir is None:
                raise ValueError(
                    f'"persist": {{"{key}": ...}} needs "dir": the directory to write checkpoints '
                    "to"
                )
        most = self.persist.max_lost_steps
        # If the interval adapts, every second step is without a snapshot, to measure the cost.
        every = 2 if self.adapts else self.version_steps
        if most is not None and most < 2 * every:
            raise ValueError(
                f"persist.max_lost_steps is {most}, but snapshots exist only every {every} "
                f"steps; write at least {2 * every}"
            )

    def _check_aor(self) -> None:
        if not self.recompute:
            return
        if self._replicated_protection == "none":
            raise ValueError(
                f'"protection": "{self.protection}" keeps nothing of a peer that it could '
                "recompute; write "
                f'"arc+aor" or "aec+aor"'
            )
        if self.interval_steps != 1:
            raise ValueError(
                f'"protection": "{self.protection}" needs the gradients of every step, but '
                "interval_steps is "
                f"{self.interval_steps}; write 1, or remove +aor"
            )

    @property
    def arena_count(self) -> int:
        if self.arenas is not None:
            return self.arenas
        return 3 if self.persist.dir is not None else 2

    def as_block(self) -> dict[str, Any]:
        """Return the explicitly set keys as JSON types; parsing them gives this object again.

        Defaults are left out, because some keys are refused if they are given without effect.
        """
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def job_memory_dir(self) -> Path:
        """The job's memory directory on this node; requires that ``job_id`` is set."""
        assert self.job_id is not None
        return self.memory_dir / self.job_id


NESTED: dict[str, type[ConfigBlock]] = {
    name: field.annotation
    for name, field in ReftConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigBlock)
}
"""Classes of the objects within the ``reft`` block, by their key."""


def read_object(path: Path, what: str, expected: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file.
        what: description of the file, for messages.
        expected: expected content, for messages.

    Raises:
        ConfigError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", error)
        raise ConfigError(f"cannot read {what} {path}: {cause}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} holds a {type(values).__name__}; expected {expected}")
    return values


def load_config(ds_config: Mapping[str, Any] | None) -> ReftConfig:
    """Read the ``reft`` block from a DeepSpeed configuration, and apply the environment.

    Args:
        ds_config: the DeepSpeed JSON as a mapping, with or without a ``reft`` block.

    Returns:
        The checked configuration; without a block, ``enabled`` is False.

    Raises:
        ConfigError: the block is invalid.
    """
    block = (ds_config or {}).get(BLOCK_NAME, {})
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'"{BLOCK_NAME}" is {block!r}; expected an object, for example '
            f'"{BLOCK_NAME}": {{"enabled": true}}'
        )
    return parse_block(dict(block), os.environ)


def read_block(path: Path) -> dict[str, Any]:
    """Read the ``reft`` block from a JSON file without checking its keys.

    The file is a DeepSpeed JSON, or contains only the block.

    Raises:
        ConfigError: the file cannot be read, or has no block.
    """
    block = read_object(path, f"the {BLOCK_NAME} block's file", f'{{"{BLOCK_NAME}": {{...}}}}').get(
        BLOCK_NAME
    )
    if not isinstance(block, dict):
        raise ConfigError(
            f'{path} holds no "{BLOCK_NAME}" object; write '
            f'{{"{BLOCK_NAME}": {{"enabled": true}}}} into it'
        )
    return block


def parse_block(block: dict[str, Any], environ: Mapping[str, str] | None = None) -> ReftConfig:
    """Apply environment variables to a ``reft`` block, and check it.

    REFT_MEMORY_DIR and REFT_JOB_ID override the block, because the launcher and its daemon use the
    directory that they name. The keys in REFT_PROFILE, a JSON object that ``reft profile`` and
    similar commands set, override the block, too.

    Args:
        block: the block; changed in place.
        environ: environment variables; None: apply none.

    Raises:
        ConfigError: the block is invalid.
    """
    environ = environ or {}
    for name, key in ((ENV_MEMORY_DIR, "memory_dir"), (ENV_JOB_ID, "job_id")):
        if value := environ.get(name):
            if block.get(key) not in (None, value):
                logger.warning("reft.%s is %s, but %s=%s is used", key, block[key], name, value)
            block[key] = value
    _apply_preset(block)
    if not block.get("job_id") and (run := make_run_name(environ)):
        block["job_id"] = run
    if asked := environ.get(ENV_PROFILE):
        # Enable reft, because `reft profile` also measures jobs without a block.
        block |= {"enabled": True, **json.loads(asked)}
    try:
        return ReftConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain_errors(error)) from error


PRESETS: dict[str, dict[str, Any]] = {
    "short": {"enabled": False},
    "middle": {"enabled": True, "protection": "arc"},
    "long": {"enabled": True, "protection": "auto", "persist": {"interval_steps": AUTO}},
}
"""Settings by ``preset``, from Paddle's elastic design: a job of hours loses less by starting again
than protection costs, one of days keeps a copy, and one of weeks is also written to storage."""


def _apply_preset(block: dict[str, Any]) -> None:
    """Add the settings of the block's ``preset`` for all keys that the block does not set."""
    name = block.get("preset")
    for key, value in PRESETS.get(name, {}).items() if isinstance(name, str) else ():
        given = block.get(key, {})
        if isinstance(value, dict) and isinstance(given, Mapping):
            block[key] = {**value, **given}
        else:
            block.setdefault(key, value)


def _explain_errors(error: ValidationError) -> str:
    lines = [f'the "{BLOCK_NAME}" block cannot be used:']
    other_kind = ""
    for item in error.errors():
        loc, message = item["loc"], item["msg"].removeprefix("Value error, ")
        last = str(loc[-1]) if loc else ""
        # For a key that takes a number or "auto", pydantic reports two errors: merge them into the
        # second one.
        if last == "int" or last.startswith("constrained-"):
            other_kind = message.partition(",")[0]
            continue
        if last.startswith("literal["):
            loc, message = loc[:-1], f'{other_kind} or "auto"'
        path = ".".join(str(p) for p in (BLOCK_NAME, *loc))
        if item["type"] == "extra_forbidden":
            known = _keys_at(loc[:-1])
            near = get_close_matches(last, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
            lines.append(f"  {path}: unknown key; {hint}")
        else:
            of_part = not loc or loc[-1] in NESTED  # Then the message already contains the value
            found = (
                "" if item["type"] == "value_error" and of_part else f" (found {item['input']!r})"
            )
            lines.append(f"  {path}: {message}{found}")
    lines.append("  'reft config --explain' lists every key with its default and meaning")
    return "\n".join(lines)


# Keys that are not explained: one is for tests, the other is set by reft for the node's daemon
_NOT_FOR_USERS = ("faults", "local")


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {**NESTED, "faults": FaultConfig}
    model: type[BaseModel] = next(
        (models[str(name)] for name in path if name in models), ReftConfig
    )
    return [name for name in model.model_fields if name not in _NOT_FOR_USERS]


@dataclass(frozen=True)
class KeyDoc:
    """One line of ``reft config --explain``."""

    key: str
    type: str
    default: Any
    unit: str
    meaning: str


_UNITS = {"_bytes": "bytes", "_secs": "seconds", "_steps": "optimizer steps"}


def explain(model: type[BaseModel] = ReftConfig, prefix: str = "") -> Iterator[KeyDoc]:
    """Yield every key of the ``reft`` block with type, default, unit and meaning, in the order of
    definition."""
    for name, field in model.model_fields.items():
        key = prefix + name
        if name in NESTED:
            yield from explain(NESTED[name], key + ".")
        elif name not in _NOT_FOR_USERS:
            default = field.get_default(call_default_factory=True)
            default = str(default) if isinstance(default, Path) else default
            meaning = " ".join((field.description or "").split())
            unit = next((u for suffix, u in _UNITS.items() if name.endswith(suffix)), "")
            yield KeyDoc(key, _type_name(field.annotation), default, unit, meaning)


def _type_name(annotation: Any) -> str:
    if (origin := get_origin(annotation)) is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (Union, UnionType, Literal):
        return " | ".join(map(_type_name, get_args(annotation)))
    if annotation is NoneType:
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " | ".join(annotation)
    return (
        annotation.__name__ if isinstance(annotation, type) and origin is None else str(annotation)
    )
