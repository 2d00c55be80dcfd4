"""What a process is doing, in four numbers that the training loop stores and other processes may read."""

from __future__ import annotations

#: Where `RunContext.activity` has optimizer steps, the batch, the phase and the phase's beginning (UNIX time).
STEP, BATCH, PHASE, SINCE = range(4)
PHASES = (
    "setup", "next batch", "training_step", "backward", "optimizer step", "validation", "test", "predict",
    "save_checkpoint", "code after training",
)  # fmt: skip
#: Numbers of `PHASES`; 0 is none of them.
SETUP, NEXT_BATCH, TRAINING_STEP, BACKWARD, OPTIMIZER_STEP, VALIDATION, TEST, PREDICT, SAVE, AFTER = range(1, 11)
