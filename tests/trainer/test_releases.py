"""A version's files as the store gets them, with a real buffer, a real store and a real trainer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_house import FINGERPRINT, PATIENCE_S, RUN, TOKEN, House
from buffer_house import Context as StoreContext
from tiny_lm import VOCABULARY, tiny_lm

from async_rl.config import AlgorithmConfig, ModelConfig, TrainerConfig
from async_rl.fingerprint import pacing
from async_rl.policy.update_file import read_kind, read_snapshot, read_update
from async_rl.run.process import StopEvent
from async_rl.run.watchdog import Watchdog
from async_rl.version import PolicyId
from async_rl.wire.link import Client, Server
from async_rl.wire.messages import TrainerReady
from buffer.policy_files import PolicyFiles
from buffer.store import StoreService
from trainer.backend import Sample
from trainer.publish import Publisher
from trainer.releases import Releases
from trainer.torch_backend import TorchBackend

SKETCH = TrainerConfig(kind="sketch", rank=4, snapshot_every=2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_lm("qwen3").save_pretrained(path)
    return path


class Pools:
    """Buffer and store in threads, and a trainer's links to them."""

    def __init__(self, folder: Path) -> None:
        self.house = House(folder)
        self.config = self.house.config
        endpoint = f"ipc://{folder / 's'}"
        self._server = Server(endpoint, run=RUN, token=TOKEN, name="store")
        self.files = PolicyFiles(folder / "store", RUN, 100)
        self._stopping = StopEvent()
        context: Any = StoreContext(self.config, self._stopping, self.house.exporter, self.house.watchdog)
        self._thread = threading.Thread(target=StoreService(context, self._server, self.files).serve, daemon=True)
        self._thread.start()
        self.store = Client(endpoint, run=RUN, token=TOKEN, role="trainer", name="trainer", peer="store")
        self.store.connect(PATIENCE_S)
        self.buffer = self.house.client("trainer", "trainer")
        self.buffer.send(TrainerReady(FINGERPRINT, pacing(self.config), None, "life", 0))

    def close(self) -> None:
        self.house.close()
        self._stopping.set()
        self.store.close()
        self._thread.join(PATIENCE_S)
        self._server.close()


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.close()


class Context:
    """What Releases needs of a PoolContext."""

    def __init__(self, folder: Path, model_path: Path, trainer: TrainerConfig) -> None:
        self.directory, self.config, self.watchdog = self, self, Watchdog()
        self.model = ModelConfig(path=str(model_path))
        self.adapters, self.trainer, self.run, self.seed = folder, trainer, self, 0
        folder.mkdir(exist_ok=True)


def make(pools: Pools, model_path: Path, folder: Path, trainer: TrainerConfig) -> tuple[TorchBackend, Releases]:
    backend = TorchBackend(
        model_path, trainer=trainer, algorithm=AlgorithmConfig(treatment="uncorrected"), temperature=1.0, seed=1,
        device="cpu",
    )  # fmt: skip
    context: Any = Context(folder, model_path, trainer)
    return backend, Releases(context, backend, Publisher(pools.buffer, pools.store))


def batch(seed: int, advantage: float = 1.0) -> list[Sample]:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 9).astype(np.int32)
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0], np.uint8)
    return [Sample(tokens, np.where(mask == 0, -2, 0).astype(np.float32), mask, np.zeros(9, np.int32), advantage, 0, 0)]


def stored(pools: Pools) -> list[tuple[str, int, str, int | None]]:
    """Name, version, kind and the parent's version of every policy the store has, in the order of arrival."""
    return [
        (policy.name, policy.version, entry.kind, entry.parent and entry.parent.version)
        for policy in pools.files.sizes
        if (entry := pools.files.get(policy)) is not None
    ]


def test_a_sketchs_versions_are_changes_of_one_another_with_whole_copies_between(
    pools: Pools, model_path: Path, tmp_path: Path
) -> None:
    backend, releases = make(pools, model_path, tmp_path / "first", SKETCH)
    releases.canary()
    policies = [releases.release(0)[0]]
    for version in range(1, 4):
        backend.step(batch(version, advantage=0.0 if version == 3 else 1.0), 1e-3)
        policies.append(releases.release(version)[0])
    assert stored(pools) == [
        ("main", 0, "base", None), ("main", 1, "factors", 0),
        ("snapshot", 2, "snapshot", None), ("main", 2, "factors", 1), ("main", 3, "factors", 2),
    ]  # fmt: skip
    for parent, policy in pairwise(policies):
        assert pools.files.get(policy).parent == parent
    assert policies[3].digest == policies[2].digest  # the third step was skipped
    assert not list((tmp_path / "first").glob("snapshot*"))
    sizes = releases.sizes()
    assert sizes["push_bytes"] == pools.files.sizes[policies[1]]
    assert sizes["push_bytes"] < sizes["push_bytes_adapter"] < sizes["push_bytes_full"]


def test_a_trainer_that_goes_on_stores_a_whole_copy_and_the_same_file_again(
    pools: Pools, model_path: Path, tmp_path: Path
) -> None:
    """The store may have lost what its version is a change of, or may have all of it."""
    backend, releases = make(pools, model_path, tmp_path / "first", SKETCH)
    releases.release(0)
    backend.step(batch(1), 1e-3)
    policy, _ = releases.release(1)
    (tmp_path / "saved").mkdir()
    backend.save(tmp_path / "saved")
    before = pools.files.get(policy)
    resumed, again = make(pools, model_path, tmp_path / "second", SKETCH)
    resumed.load(tmp_path / "saved")
    assert again.release(1)[0] == policy
    assert pools.files.get(policy) == before
    assert read_kind(tmp_path / "second" / "outgoing.safetensors") == "factors"
    assert read_update(tmp_path / "second" / "outgoing.safetensors").digest == policy.digest
    whole = PolicyId("snapshot", 1, policy.digest)
    assert ("snapshot", 1, "snapshot", None) in stored(pools)
    copy = tmp_path / "copy"
    copy.write_bytes(pools.files.read(whole, 0, pools.files.sizes[whole]))
    tensors = read_snapshot(copy, policy.digest).tensors
    assert all((tensors[name] == parameter).all() for name, parameter in resumed.model.named_parameters())


@pytest.mark.parametrize(
    ("trainer", "kinds"),
    [
        (TrainerConfig(kind="full"), ["base", "snapshot"]),
        (TrainerConfig(kind="sketch", rank=4, publish="snapshots"), ["base", "snapshot"]),
        (TrainerConfig(kind="lora", rank=4), ["lora", "lora"]),
    ],
    ids=lambda value: value.kind if isinstance(value, TrainerConfig) else "",
)
def test_where_every_version_is_whole_nothing_else_is_stored(
    pools: Pools, model_path: Path, tmp_path: Path, trainer: TrainerConfig, kinds: list[str]
) -> None:
    backend, releases = make(pools, model_path, tmp_path / "first", trainer)
    releases.release(0)
    backend.step(batch(1), 1e-3)
    releases.release(1)
    assert stored(pools) == [("main", version, kind, None) for version, kind in enumerate(kinds)]
    if trainer.kind == "lora":
        assert releases.sizes()["push_bytes"] == pytest.approx(releases.sizes()["push_bytes_adapter"], rel=0.5)
