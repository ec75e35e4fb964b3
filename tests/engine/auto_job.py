"""Four data-parallel ranks under ``"protection": "auto"``: what is chosen, said, kept and given back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reft.config import parse_block
from reft.engine import session as session_module
from reft.engine.checks.choice import DeviceFindings
from reft.engine.deepspeed import session_of
from reft.errors import ConfigError
from tests.engine.ranks import be_a_rank
from tests.engine.shared import Told
from tests.engine.traffic_job import make, train
from tests.old_deepspeed import GRADIENTS_ARE_NOT_AVERAGED

RECOMPUTED, MEASURED = "recomputed", "measured"
TRIED = DeviceFindings("a device of these hosts", 1, 1e15, adam_is_exact=True, adam_parameters_per_sec=1e9)
"""As if: what is recomputed here is exact, and gradients are on the host at once."""
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "zero1": {},
    "together": {},
    "tight": {"memory_limit_bytes": 3 * 2**20},
    "by_hand": {"protection": "arc", "tolerance": 2},
    RECOMPUTED: {"protection": "auto+aor"},
    MEASURED: {},
    "unpartitioned": {"protection": "auto+aor", "tolerance": 2},
}
ZERO1 = ("zero1", RECOMPUTED, MEASURED)
if GRADIENTS_ARE_NOT_AVERAGED:
    del CASES[RECOMPUTED], CASES[MEASURED]

AGAIN: tuple[tuple[str, dict[str, Any]], ...] = (("one", {}), ("one", {"tolerance": 2}))
"""The same job, started anew: with the same block, and with another request."""


def case(name: str, block: dict[str, Any], told: Told) -> dict[str, Any]:
    told.texts.clear()
    kept = {"reduce_scatter": False, "contiguous_gradients": False} if name in ZERO1[1:] else {}
    tried = [TRIED] * int(os.environ["WORLD_SIZE"]) if name in ("zero1", MEASURED) else []
    session_module.check_device = lambda session: tried
    engine = make(int(name in ZERO1), block, **kept)
    session = session_of(engine)
    assert session is not None
    assert parse_block(session.config.as_block()) == session.config, "the daemon reads it so"
    expected = session.state.adapter.expected_bytes()
    path, _ = engine.load_checkpoint(str(Path(block["memory_dir"]) / "none"))
    losses = train(engine)
    result = {
        "scheme": session.config.protection,
        "in_force": session.protection.record.scheme,
        "tolerance": session.tolerance,
        "expected": expected,
        "real": [image.nbytes for image in session.state.adapter.images()],
        "path": path,
        "said": [*told.texts],
        "losses": losses,
        "ordered": ordered(session, "aec+aor"),
    }
    session.close()
    copied = session.stats.traffic.to_json()["to_host"]
    return {**result, "committed": session.stats.committed_step, "gradients": copied.get("gradients", 0)}


def ordered(session: Any, scheme: str) -> str:
    """What an order that recomputes is told; it comes too late to be followed."""
    if "+aor" in session.config.protection:
        return ""
    try:
        session.protect(scheme)
    except ConfigError as error:
        return str(error)
    return ""


def main(root: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    out: dict[str, Any] = {}
    with Told("reft") as told:
        for name, settings in [*CASES.items(), *AGAIN]:
            together = name == "together"
            os.environ["REFT_NODE_ID"] = "node" if together else f"node{rank}"
            os.environ["LOCAL_RANK"] = str(rank if together else 0)
            memory = root / (name if together else f"{name}{rank}")
            block = {
                **{"enabled": True, "job_id": name, "memory_dir": str(memory)},
                **{"protection": "auto", "allow_unprotected": True, **settings},
            }
            out[f"{name}{sum(known.startswith(name) for known in out) or ''}"] = case(name, block, told)
    return out


if __name__ == "__main__":
    be_a_rank(main)
