"""What a training script needs around its loop: schedule, data order, checkpoints, metrics.

Depends on ``hf`` and ``ops``; nothing here imports Accelerate or `datasets`, so that the scripts in
``examples/`` and ``hf-deltamatch study`` share it.
"""

from hf_deltamatch.training.order import order_positions
from hf_deltamatch.training.schedule import SCHEDULES, lr_factor

__all__ = ["SCHEDULES", "lr_factor", "order_positions"]
