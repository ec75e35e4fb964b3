"""A loop that loads nothing."""

import sys

from tests.contact.scripts.training import STEPS, batch, make, note

engine = make(sys.argv[1])
for step in range(STEPS):
    loss = engine(batch(step)).square().mean()
    engine.backward(loss)
    engine.step()
    note(engine, loss)
