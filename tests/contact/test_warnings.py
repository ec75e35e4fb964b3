"""P12: whatever a start and its first step warn of is an error under ``"strict": true``, or stands here with why not.

A new warning goes through ``start_checks.warn``, or is written into this table by whoever adds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import reft

ROOT = Path(reft.__file__).parent
PLACES = ("hook", "data", "state", "megatron", "hf.py")
"""Where a start, a load and a step are followed. What goes wrong with versions, in ``snapshot``, shows by the
first version, which a strict job requires."""
LOGGED = ("warning", "error", "exception", "critical", "log")
RESTART = "said at a restart, which goes on as far as it can (P6)"
VERSION = "the first version is required of a strict job"
LATER = "said later than at the first step"
NO_FAULT = "nothing is amiss, or the user has decided it"
CHECKED = "checked at the start by other means, which strict makes an error"
WITHOUT_STRICT = {
    "data/batches.py:_say_what_is_held": NO_FAULT,
    "data/loading.py:left_out": LATER,
    "hook/choosing.py:_say": CHECKED,  # the tolerance
    "hook/device_paths.py:report_untried": NO_FAULT,
    "hook/disk.py:_refuse": RESTART,
    "hook/disk.py:check": RESTART,
    "hook/engine_state.py:capture": VERSION,
    "hook/identity.py:check_checkpoint": NO_FAULT,
    "hook/identity.py:check_memory": RESTART,
    "hook/identity.py:record": VERSION,
    "hook/identity.py:require_same": RESTART,
    "hook/identity.py:tell_of_siblings": NO_FAULT,
    "hook/job.py:_connect": LATER,
    "hook/job.py:close": LATER,
    "hook/job.py:note_commit": LATER,
    "hook/job.py:_replace_note": LATER,
    "hook/joining.py:_claim_disk": CHECKED,  # persist.dir
    "hook/joining.py:_newest_on_disk": CHECKED,  # persist.dir
    "hook/memory.py:_note": LATER,
    "hook/memory_rung.py:protect": RESTART,
    "hook/memory_rung.py:refuse_silent_restart": RESTART,
    "hook/memory_rung.py:report": NO_FAULT,
    "hook/memory_rung.py:restore": RESTART,
    "hook/on_import.py:_install": "whether there is a block is not known yet",
    "hook/monitoring.py:after_step": LATER,
    "hook/other_rung.py:restore": RESTART,
    "hook/other_rung.py:survey": RESTART,
    "hook/protection.py:_changed": LATER,
    "hook/protection.py:note": VERSION,
    "hook/rate_cache.py:_read": NO_FAULT,
    "hook/rate_cache.py:_write": LATER,
    "hook/rates.py:newest_step": LATER,
    "hook/other_replicas.py:host_state_of_replica": RESTART,
    "hook/relayout.py:take_up": RESTART,
    "hook/restore.py:_explain_disk": RESTART,
    "hook/restore.py:_load_base": RESTART,
    "hook/restore.py:_load_by_tag": CHECKED,  # at the first step
    "hook/save.py:save_with_host_state": LATER,
    "hook/start_checks.py:check_start": "time-outs: recovery is not affected",
    "hook/start_checks.py:_say_what_is_survived": NO_FAULT,  # what is, declared nodes, allow_unprotected
    "hook/start_checks.py:_warn_at_start": RESTART,
    "hook/start_checks.py:warn": "the place where strict is asked",
    "hook/stopping.py:stop_alone": LATER,
    "hook/stopping.py:stop_together": LATER,
    "hook/tracing.py:profile": NO_FAULT,
    "megatron/core/attach.py:load": RESTART,
    "megatron/core/local.py:settle": LATER,
    "megatron/core/program.py:_take_over_local_checkpoints": NO_FAULT,
    "megatron/deepspeed.py:join": "a checkpoint of the program: recovery is not affected",
    "state/blob.py:_encoded": "strict takes no such version, and the first one is required",
}


def logged(node: ast.AST, function: str = "") -> Iterator[str]:
    """Functions below ``node`` that log a warning or worse."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        call = child.func if isinstance(child, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in LOGGED and "logg" in ast.unparse(call.value):
            yield inside
        yield from logged(child, inside)


def test_p12_no_warning_escapes_strict() -> None:
    paths = [
        path
        for place in PLACES
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    found = {
        f"{path.relative_to(ROOT)}:{name}" for path in paths for name in logged(ast.parse(path.read_text()))
    }
    assert sorted(found - WITHOUT_STRICT.keys()) == [], (
        "say it through start_checks.warn, or say here why not"
    )
    assert sorted(WITHOUT_STRICT.keys() - found) == [], "they are gone: remove them here"
