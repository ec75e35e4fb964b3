"""What a script without the block finds of DeepSpeed and of modules, whatever it was started by.

The package's name is spelt in two halves: scripts that mention it are taken for ones that may have a block.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
from torch import nn

PACKAGE = "re" + "ft"
# A build takes minutes, and is no part of what is looked at.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
before = dict(deepspeed.ops.__compatible_ops__)
initialize: Any = deepspeed.initialize
if "--initialize" in sys.argv:
    initialize = __import__(PACKAGE).initialize
deepspeed.init_distributed("gloo", verbose=False)
model = nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "steps_per_print": None,
}
engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
torch.manual_seed(3)
losses = []
for _ in range(3):
    loss = engine(torch.ones(1, 4)).sum()
    engine.backward(loss)
    engine.step()
    losses.append(float(loss).hex())
facts = {
    "tables": [before, dict(deepspeed.ops.__compatible_ops__)],
    "engine": sorted(vars(engine)),
    "init_distributed": [
        found is sys.modules["deepspeed.comm.comm"].init_distributed  # type: ignore[attr-defined]
        for found in (deepspeed.init_distributed, deepspeed.comm.init_distributed)
    ],
    "modules": sorted(name for name in sys.modules if name.split(".")[0] == PACKAGE),
    "done": True,
}
path = os.environ["TEST_OUT"] + "/rank0.json"
with open(path + ".draft", "w") as file:
    json.dump(facts, file)
os.rename(path + ".draft", path)  # whole when it is seen
