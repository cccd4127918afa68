"""The table [trainer.parallel]: over how many ranks the trainer is spread, and how."""

from __future__ import annotations

from async_rl.schema import ConfigError, PositiveInt, Section


class ParallelConfig(Section, frozen=True, kw_only=True):
    """Sizes of the groups of ranks; `ranks` processes in all. With backend "torch" only `data` may be above 1: weights
    and batches are cut over these ranks (FSDP2). With "megatron" the dense layers of a pipeline stage lie on tensor ×
    data ranks, and its experts over the same ones: expert × expert_tensor of them hold each expert once."""

    tensor: PositiveInt = 1
    """Ranks that share each attention and MLP matrix of the dense layers, and the vocabulary."""
    pipeline: PositiveInt = 1
    """Stages that the layers are divided into."""
    data: PositiveInt = 1
    """Parts that each batch is dealt out in; with backend "megatron" each has a copy of all that."""
    expert: PositiveInt = 1
    """Ranks that the experts of a layer are dealt out to."""
    expert_tensor: PositiveInt = 1
    """Ranks that share each expert's matrices."""
    sequence: bool = False
    """Norms and what lies between the matrices are computed on a part of the tokens by each tensor rank."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises ConfigError for sizes that do not fit into one another."""
    stage = parallel.tensor * parallel.data
    if stage % (parallel.expert * parallel.expert_tensor):
        raise ConfigError(
            f"[trainer.parallel] expert × expert_tensor = {parallel.expert} × {parallel.expert_tensor} does not divide "
            f"tensor × data = {parallel.tensor} × {parallel.data}, the ranks of a pipeline stage that experts are laid "
            "over: change one of them"
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("[trainer.parallel] sequence = true has no meaning with tensor = 1: remove it")
