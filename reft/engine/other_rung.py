"""Memory of another layout as a rung of the ladder: a job that is started with other stages or slices goes on
from what the one before left in memory."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace

from reft.engine.coordinates import local_rank
from reft.engine.deepspeed_engine import DeepSpeedEngine
from reft.engine.memory_rung import MemoryRung
from reft.engine.memory_source import MemorySource
from reft.engine.relayout import Relayout
from reft.engine.session import Session
from reft.errors import LayoutError
from reft.memory.arena_files import slots_with
from reft.recover.other_layout import OtherMemory
from reft.recover.plan import NotRecoverable, RecoveryPlan
from reft.state.fingerprint import BY_LAYOUT

logger = logging.getLogger(__name__)


class OtherRung:
    """Restores one session. Collective: all methods, on all ranks.

    Args:
        session: of the engine.
        engine: the engine.
        memory: the rung of the own layout, which has the restored host state from here.
    """

    def __init__(self, session: Session, engine: DeepSpeedEngine, memory: MemoryRung) -> None:
        self._session = session
        self._engine = engine
        self._rung = memory
        self._memory: OtherMemory
        self._why_not: NotRecoverable | None = None

    def survey(self, own: RecoveryPlan | NotRecoverable) -> RecoveryPlan | None:
        """The newest whole version of another layout, if it is newer than what the own layout has.

        Args:
            own: what the survey of the own layout found.
        """
        session = self._session
        self._memory = OtherMemory(
            session.topology,
            session.control,
            job_id=session.job_id,
            job_dir=session.memory.job_dir.path,
            secret=session.memory.job_dir.secret,
            faults=session.faults,
        )
        found = self._memory.survey(own.label if isinstance(own, RecoveryPlan) else None)
        if isinstance(found, NotRecoverable):
            self._why_not = found
        if not isinstance(found, RecoveryPlan):
            return None
        if found.rejected and session.is_rank_zero:
            logger.warning("newer versions of %s are not whole: %s", found.degrees, "; ".join(found.rejected))
        return found

    def explain(self, own: RecoveryPlan | NotRecoverable) -> RecoveryPlan | NotRecoverable:
        """``own``, with what is wrong with the memory of the other layouts in it."""
        if isinstance(own, RecoveryPlan) or self._why_not is None:
            return own
        return replace(own, reasons=self._why_not.reasons, notes=(*own.notes, *self._why_not.notes))

    def restore(self, plan: RecoveryPlan) -> bool:
        """Take the version up, start the session, and protect it.

        Returns:
            Whether it was; False: names do not allow it, and nothing has been written.

        Raises:
            FingerprintError: another job left it, or this one with other settings.
            TransferError: a peer is gone, or its memory changed while it was read.
        """
        session, label = self._session, plan.label
        began = time.perf_counter()
        job_dir = session.memory.job_dir
        session.memory.identity.check_memory(
            job_dir.path, label, reads=session.is_first_on_node, but=BY_LAYOUT
        )
        source = MemorySource(self._memory, plan, session.job_id, session.coordinate)
        try:
            state = Relayout(session, self._engine, source).take_up()
        except LayoutError as error:
            why = f"{label} of {plan.degrees}: {error}"
            self._why_not = NotRecoverable(reasons=(why,))
            if session.is_rank_zero:
                logger.warning("the memory of job %s is left aside: %s", session.job_id, why)
            return False
        self._rung.after_restore(state)
        moved: Counter[str] = Counter()
        for stats in self._memory.moved:
            moved.update(stats.bytes_from)
        session.events.write(
            "restored",
            source="memory",
            version=label.step,
            incarnation=label.incarnation,
            bytes_from=dict(moved),
            repaired=[],
            secs=time.perf_counter() - began,
        )
        # What the other layout left is kept until the first version of this one is committed (P3).
        held = slots_with(job_dir.path, job_dir.secret, local_rank(), label)
        session.start(dict.fromkeys(held, label))
        self._rung.protect()
        self._rung.report(f"memory, {label} of {plan.degrees}", began)
        return True
