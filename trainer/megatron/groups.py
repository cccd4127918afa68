"""megatron-core's process groups for a table [trainer.parallel], over ranks that torch.distributed has brought up.

Ranks are numbered with the tensor ranks of a stage next to each other (on one machine), then the data ranks, then the
pipeline stages. Experts are laid over the same ranks of a stage: expert_tensor next to each other, then expert, then
what is left: copies of the experts.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router_replay import RouterReplay

from async_rl.parallel_config import ParallelConfig, check_parallel
from async_rl.schema import ConfigError
from trainer.megatron import shim


def begin(parallel: ParallelConfig, device: torch.device) -> None:
    """Make the groups, and this rank's device the current one. Raises ConfigError where `parallel` does not fit the
    number of ranks. Ranks wait for each other as long as in the default group, in whole minutes (megatron-core counts
    them so, and would take 30). Nothing in this backend draws at random on a rank, so there is no seed to set."""
    check_parallel(parallel)
    if dist.get_world_size() != parallel.ranks:
        raise ConfigError(
            f"[trainer.parallel] tensor × pipeline × data = {parallel.tensor} × {parallel.pipeline} × {parallel.data}: "
            f"{parallel.ranks} ranks, but {dist.get_world_size()} were started"
        )
    shim.install()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(_timeout(device) / timedelta(minutes=1)),
    )
    # NCCL wants all ranks of a group in its first call; two stages that send to one another are not all of them.
    dist.all_reduce(torch.zeros(1, device=device), group=parallel_state.get_pipeline_model_parallel_group())


def _timeout(device: torch.device) -> timedelta:
    """Of the default group's operations on a device of this kind."""
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
    found: timedelta = backend.options._timeout
    return found


def end() -> None:
    """Forget the groups, so that others can be made."""
    parallel_state.destroy_model_parallel()
    RouterReplay.clear_global_router_replay_instances()


def current() -> ProcessGroupCollection:
    """This rank's groups: tp (tensor), pp (pipeline), dp (data), ep (expert), expt_tp (expert tensor), expt_dp (copies
    of an expert)."""
    return ProcessGroupCollection.use_mpu_process_groups()
