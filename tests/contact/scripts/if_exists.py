"""A loop that loads where a file is there."""

import os
import sys

from tests.contact.scripts.training import STEPS, batch, make, note

engine = make(sys.argv[1])
save_dir = sys.argv[2]
if os.path.exists(os.path.join(save_dir, "latest")):
    engine.load_checkpoint(save_dir)
while engine.global_steps < STEPS:
    loss = engine(batch(engine.global_steps)).square().mean()
    engine.backward(loss)
    engine.step()
    note(engine, loss)
