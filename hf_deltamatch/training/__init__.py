"""What a training script needs around its loop: schedule, data order, packing, optimisers,
checkpoints, what to do with NaN, throughput.

Depends on ``hf`` and ``ops``; nothing here imports Accelerate or `datasets`, so that the scripts in
``examples/`` and ``hf-deltamatch study`` share it.
"""

from hf_deltamatch.training.arms import ARMS, apply_arm, recipes_of, train_config
from hf_deltamatch.training.checkpoints import (
    CheckpointError,
    checkpoints,
    read_manifest,
    write_checkpoint,
)
from hf_deltamatch.training.guard import NotFinite, StepGuard
from hf_deltamatch.training.optim import OPTIMIZERS, build_optimizers, set_lr
from hf_deltamatch.training.order import order_positions
from hf_deltamatch.training.packing import IGNORED, Packer, Rows, join, model_inputs
from hf_deltamatch.training.schedule import SCHEDULES, lr_factor
from hf_deltamatch.training.throughput import Meter, flops_per_token, peak_flops

__all__ = [
    "ARMS",
    "IGNORED",
    "OPTIMIZERS",
    "SCHEDULES",
    "CheckpointError",
    "Meter",
    "NotFinite",
    "Packer",
    "Rows",
    "StepGuard",
    "apply_arm",
    "build_optimizers",
    "checkpoints",
    "flops_per_token",
    "join",
    "lr_factor",
    "model_inputs",
    "order_positions",
    "peak_flops",
    "read_manifest",
    "recipes_of",
    "set_lr",
    "train_config",
    "write_checkpoint",
]
