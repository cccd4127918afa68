"""Kind "full": every parameter learns, by AdamW, and each version is published whole: what others are measured by."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel

from async_rl.config import TrainerConfig
from async_rl.policy.update_file import read_snapshot, weights_digest, write_base, write_snapshot
from trainer import optimizer_state
from trainer.adamw import AdamW
from trainer.learnable import Proposal
from trainer.whole_model import all_parameters, write_whole

log = logging.getLogger("trainer")


class FullWeights(AdamW):
    """`trainer.learnable.Learnable`. Weights and moments are in the dtype that the model was loaded in; tied parameters
    count once."""

    has_base = False
    rounds = False  # to the nearest: what is too small is lost, and nothing is added

    def __init__(self, model: PreTrainedModel, trainer: TrainerConfig, model_path: str) -> None:
        self.model = model
        self.model_path = model_path
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        super().__init__(all_parameters(model), trainer)
        self.modules = tuple(self.parameters)
        count = sum(parameter.numel() for parameter in self.parameters.values())
        log.info("all %s weights learn, in %d parameters", f"{count:,}", len(self.parameters))
        if any(parameter.itemsize < 4 for parameter in self.parameters.values()):
            log.warning(
                "the weights are stored in half precision, where a step that is smaller than half a unit in the last "
                'place is lost: at small learning rates most are ([model] dtype = "float32" keeps them)'
            )

    def propose(self, norm: float, rate: float) -> Proposal:
        return Proposal({}, self.displacement(norm, rate))

    def take(self, proposal: Proposal, scale: float) -> None:
        self.add(proposal.dense, scale)

    def export(self, path: Path) -> str:
        """A snapshot; before the first step, the word that the weights are the checkpoint's."""
        if self.steps == 0:
            return write_base(path, weights_digest(self.parameters))
        return self.export_whole(path)

    def export_whole(self, path: Path) -> str:
        return write_snapshot(path, self.parameters, None, self.steps)

    def export_final(self, folder: Path) -> None:
        write_whole(folder, self.model, self.model_path)

    def save(self, folder: Path) -> None:
        """weights.safetensors (a snapshot), optimizer.safetensors and backend.json."""
        digest = self.export_whole(folder / optimizer_state.WEIGHTS_FILE)
        optimizer_state.write_moments(folder, self.parameters, self.optimizer)
        optimizer_state.write_counters(folder, optimizer_state.Counters(self.steps, digest, self.model_path, "full"))

    def load(self, folder: Path) -> None:
        counters = optimizer_state.read_counters(folder, "full")
        if (folder / optimizer_state.WEIGHTS_FILE).is_file():
            found = read_snapshot(folder / optimizer_state.WEIGHTS_FILE, counters.digest)
            optimizer_state.restore(folder, found.tensors, self.parameters, self.optimizer)
        else:
            self._load_parts(folder, counters.digest)
        self.steps = counters.optimizer_steps

    def _load_parts(self, folder: Path, digest: str) -> None:
        """Of several ranks."""
        from trainer.fsdp import saved

        state = saved.lay_out(folder, self.parameters)
        saved.fill(folder, state)
        saved.check_digest(folder, {name: state[name] for name in self.parameters}, digest)
        saved.restore(state, self.parameters, self.optimizer)
