"""A plain loop with reft.resume."""

import sys

import reft
from tests.contact.scripts.training import STEPS, batch, make, note

engine = make(sys.argv[1])
reft.resume(engine)
for step in range(engine.global_steps, STEPS):
    loss = engine(batch(step)).square().mean()
    engine.backward(loss)
    engine.step()
    note(engine, loss)
