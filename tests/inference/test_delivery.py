"""Factor updates on their way: the trainer's files through a real store, over a real link, into engines with one copy
of the weights, which have to have the trainer's bits in the end, whatever happened in between."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sketched_policies import File, SketchedPolicies
from store_house import RUN, TOKEN, House, wait_for
from store_house import Node as Puller
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.policy import tensor_file, update_file
from async_rl.policy.update_file import write_snapshot
from async_rl.run.killpoints import VARIABLE
from async_rl.version import PolicyId
from async_rl.wire.messages import SNAPSHOT, Pull, Upload
from inference import policies
from inference.model_weights import model_weights
from inference.policies import PolicyFetched, PolicyFetchFailed
from inference.serving import Serving
from inference.torch_engine import TorchEngine

SHAPE = {
    "vocab_size": 23, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
BOUND = 2
EVERY = 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE)).save_pretrained(folder)
    return folder


class Pool:
    """A store, the trainer's side of it, and nodes."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.house = House(folder, BOUND)
        (folder / "trainer").mkdir()
        self.policies = SketchedPolicies(model, folder / "trainer")
        self._names = iter(f"node{number}" for number in range(99))
        self.publish(self.policies.main[0])

    def publish(self, *files: File) -> None:
        for file in files:
            self.house.upload_as(file.policy, file.path.read_bytes(), file.kind, file.parent)

    def step(self) -> None:
        file = self.policies.step(still=self.policies.version % 40 == 7)
        if file.policy.version % EVERY == 0:
            self.publish(self.policies.snapshot())
        self.publish(file)

    def node(self) -> Node:
        return Node(self)

    def start_store_again(self) -> None:
        self.house.kill()
        self.house.open(keep=True)

    @property
    def newest(self) -> PolicyId:
        return self.policies.main[-1].policy


class Node:
    """What of a node has to do with policies: the puller, the engine, and what serves. It has no requests."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.link = pool.house.link("node", next(pool._names))
        self.engine = TorchEngine(
            pool.model, slots=1, max_context=16, max_resident=2, device="cpu", dtype="float32", storage="float32",
            compile_mode="never",
        )  # fmt: skip
        self.puller: Puller = pool.house.node(self.link, True, self.engine.read)
        self.failed: list[str] = []
        self.trouble: list[str] = []
        self.routes: list[int] = []  # files of each
        self.serving = Serving(
            self.engine, "continue", 10.0, self.puller.puller.ask, lambda _, error: self.trouble.append(error),
            lambda *_: None, lambda *_: None, again=self.puller.puller.again,
        )  # fmt: skip
        self.now = 0.0

    def take(self, item: Any) -> None:
        if isinstance(item, PolicyFetchFailed):
            self.failed.append(item.error)
            return
        assert isinstance(item, PolicyFetched), item
        self.routes.append(len(list(item.path.iterdir())) if item.path.is_dir() else 1)
        self.serving.fetched(item, self.now)

    def advance(self) -> None:
        while not self.puller.inbox.empty():
            self.take(self.puller.inbox.get())
        self.now += 1.0
        flipped = self.serving.advance(self.now)
        if flipped is not None:
            self.puller.puller.serves(flipped.installed.policy)

    def come_to(self, policy: PolicyId) -> None:
        def come() -> bool:
            self.advance()
            return self.engine.serving == policy

        wait_for(come, f"policy {policy.short()} to serve; {self.failed}, {self.trouble}")

    def is_the_trainers(self) -> None:
        self.come_to(self.pool.newest)
        expected = self.pool.policies.tensors()
        held = model_weights(self.engine._runner.model).parameters
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert self.own_files() == []

    def own_files(self) -> list[Path]:
        return list(self.puller.folder.iterdir())

    def die(self) -> None:
        """As far as its peers can tell."""
        self.puller.puller.close()
        self.link.close(0.0)


@pytest.fixture
def pool(model: Path, tmp_path: Path) -> Iterator[Pool]:
    made = Pool(model, tmp_path)
    yield made
    made.house.close()


def test_after_200_updates_every_node_has_the_trainers_bits_whenever_it_came_and_whatever_died(pool: Pool) -> None:
    """Two nodes from the start, of which one dies and comes back, a late joiner before the first snapshot and one long
    after, and a store that is killed twice."""
    first, second = pool.node(), pool.node()
    late: Node | None = None
    for version in range(1, 201):
        pool.step()
        first.advance()
        if version == 10:
            late = pool.node()
            late.is_the_trainers()
            assert late.routes == [11]  # from the base on
        if version == 60:
            second.is_the_trainers()
            second.die()
        if version in (80, 150):
            pool.start_store_again()
        if version == 120:
            second = pool.node()
            second.is_the_trainers()
            assert second.routes == [21]  # snapshot 100, and 20 updates
        if version > 120 and version % 3 == 0:
            second.advance()
    assert late is not None
    assert pool.newest.version == 200
    joiner = pool.node()
    while not isinstance(item := late.puller.next(), PolicyFetched) or item.policy != pool.newest:
        if isinstance(item, PolicyFetched):  # what came while it was asleep, and it would go on from
            item.discard()
    late.take(item)
    for node in (first, second, late, joiner):
        node.is_the_trainers()
        assert node.trouble == []
    assert joiner.routes == [1]  # snapshot 200 itself
    assert late.routes[-1] == 1  # 190 updates are more than a snapshot
    kept = {path.name.split("-")[-1] for path in pool.house.files.glob("*.policy")}
    assert kept == {"main.policy", "snapshot.policy"}
    assert len(list(pool.house.files.glob("*.policy"))) <= EVERY + 2  # two snapshots, and the updates between


def test_a_node_that_slept_through_some_versions_applies_what_it_missed(pool: Pool) -> None:
    node = pool.node()
    node.is_the_trainers()
    for _ in range(5):
        pool.step()
    wait_for(lambda: node.link._arrived.qsize() == 0, "the announcements")
    node.is_the_trainers()
    for _ in range(3):
        pool.step()
    node.is_the_trainers()
    assert node.trouble == []


def test_a_policy_fetched_before_the_last_one_was_flipped_to_is_applied_from_there(pool: Pool) -> None:
    """Both were pulled as ways from what served then."""
    node = pool.node()
    node.is_the_trainers()
    held = []
    for _ in range(2):
        pool.step()
        held.append(node.puller.next())
    for item in held:
        node.take(item)
        node.advance()
    node.is_the_trainers()
    assert node.routes == [1, 1, 2]
    assert node.trouble == []


def test_a_trainer_that_goes_back_leads_nodes_from_its_snapshot_to_its_new_past(pool: Pool) -> None:
    node = pool.node()
    weights = {}
    for version in range(1, 9):
        pool.step()
        weights[version] = pool.policies.copy()
    node.is_the_trainers()
    pool.policies.back(4, weights[4])
    pool.policies._rng = torch.Generator().manual_seed(99)  # it comes out with other digests
    pool.publish(pool.policies.snapshot())
    for version in range(5, 9):
        pool.step()
        node.advance()
        assert node.engine.serving is not None
        assert node.engine.serving.version == 8  # the old one, until the version passes it
        assert pool.newest.version == version
    pool.step()
    node.is_the_trainers()
    joiner = pool.node()
    joiner.is_the_trainers()
    assert node.trouble == joiner.trouble == []


def test_a_way_from_weights_that_the_engine_has_left_meanwhile_is_asked_for_again_from_where_it_is(pool: Pool) -> None:
    """The trainer goes back while the last of its old versions waits for its flip, and no later version need follow."""
    node = pool.node()
    node.is_the_trainers()
    before = pool.policies.copy()
    for _ in range(2):
        pool.step()
    while (last := node.puller.next()).policy != pool.newest:
        last.discard()
    pool.policies.back(0, before)
    pool.policies._rng = torch.Generator().manual_seed(99)
    for _ in range(3):
        pool.step()
    stale = node.puller.next()
    assert stale.policy == pool.newest
    for item in (last, stale):
        node.take(item)
        node.advance()
    assert node.engine.serving == last.policy
    node.is_the_trainers()
    assert node.routes == [1, 2, 3, 4]  # the last begins with the base
    assert node.trouble == node.failed == []


def test_a_node_that_dies_in_the_middle_of_a_chain_leaves_nothing_and_the_next_gets_it_whole(pool: Pool) -> None:
    for _ in range(6):
        pool.step()

    def die(pull: Pull) -> None:
        if pull.policy.version == 3:
            pool.house.store.before_pull = None
            pool.house.server.disconnect("node0", "it is gone")

    pool.house.store.before_pull = die
    dying = pool.node()
    ended = dying.puller.next()
    assert isinstance(ended, Exception)
    assert dying.own_files() == []
    pool.node().is_the_trainers()


DYING = """
import queue, sys
from pathlib import Path
from async_rl.wire.link import Client
from inference.policies import PolicyPuller
endpoint, run, token, folder = sys.argv[1:]
link = Client(endpoint, run=run, token=token, role="node", name="dying", peer="store")
link.connect(60.0)
inbox = queue.SimpleQueue()
PolicyPuller(link, Path(folder), inbox, routed=True)
inbox.get(timeout=60.0)
"""


def test_a_node_that_is_killed_between_two_files_of_a_way_hinders_nobody(pool: Pool, tmp_path: Path) -> None:
    for _ in range(6):
        pool.step()
    (scratch := tmp_path / "dying").mkdir()
    died = subprocess.run(
        [sys.executable, "-P", "-c", DYING, pool.house.endpoint, RUN, TOKEN, str(scratch)],
        env=os.environ | {VARIABLE: "node.mid-route:3"}, timeout=200, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL
    assert len(list(scratch.glob("*/*"))) == 3  # in a folder that no other process looks into
    pool.node().is_the_trainers()


def test_a_way_whose_files_are_swept_while_it_is_pulled_fails_and_the_newest_comes(pool: Pool) -> None:
    for _ in range(4):
        pool.step()

    def overtake(pull: Pull) -> None:
        if pull.policy.version == 2:
            pool.house.store.before_pull = None
            for _ in range(2 * EVERY):
                file = pool.policies.step()
                files = [pool.policies.snapshot(), file] if file.policy.version % EVERY == 0 else [file]
                for each in files:
                    data = each.path.read_bytes()
                    sha256 = hashlib.sha256(data).hexdigest()
                    upload = Upload(each.policy, each.kind, len(data), sha256, each.parent)
                    pool.house.store._on_upload("trainer", upload, [memoryview(data)])

    pool.house.store.before_pull = overtake
    node = pool.node()
    wait_for(lambda: node.advance() or bool(node.failed), "the way to fail")
    assert "the store does not have it" in node.failed[0]
    node.is_the_trainers()


def test_files_damaged_on_the_stores_disk_and_other_checkpoints_are_refused(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    for _ in range(3):
        pool.step()
    path = next(pool.house.files.glob("2-*.policy"))
    whole = path.read_bytes()
    for damaged, says in (
        (whole[:-1], "the store sent"),
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "damaged"),
    ):
        path.write_bytes(damaged)
        node = pool.node()
        node.take(node.puller.next())
        assert says in node.failed[0]
        assert node.own_files() == []
        node.die()
    path.write_bytes(whole)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE)).save_pretrained(tmp_path / "other")
    pool.model = tmp_path / "other"
    stranger = pool.node()
    wait_for(lambda: stranger.advance() or bool(stranger.trouble), "its refusal")
    assert pool.policies.main[0].policy.digest in stranger.trouble[0]
    assert stranger.engine.serving is None
    pool.model = model
    pool.node().is_the_trainers()


def test_what_was_read_is_what_is_applied_whatever_becomes_of_the_file(pool: Pool) -> None:
    node = pool.node()
    node.is_the_trainers()
    pool.step()
    fetched = node.puller.next()
    fetched.discard()
    fetched.path.write_bytes(b"another")
    node.take(fetched)
    node.is_the_trainers()
    assert node.trouble == node.failed == []


def test_files_are_read_and_hashed_in_the_pullers_thread_alone(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = pool.node()
    node.is_the_trainers()  # the checkpoint's own digest is taken in the thread that has the model
    threads: dict[str, set[str]] = {}

    def watch(name: str) -> None:
        real = getattr(tensor_file, name)

        def call(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return real(*arguments)

        monkeypatch.setattr(update_file, name, call)

    file = pool.policies.step()
    digest = write_snapshot(tmp_path / "all", pool.policies.tensors(), None, 2)
    for name in ("read_header", "read_tensors", "hash_tensors"):
        watch(name)
    pool.publish(file)
    node.is_the_trainers()
    pool.publish(File(PolicyId("main", 2, digest), SNAPSHOT, tmp_path / "all"))
    node.come_to(PolicyId("main", 2, digest))
    assert threads == {name: {"policy-puller"} for name in ("read_header", "read_tensors", "hash_tensors")}


def test_a_file_that_came_as_the_store_has_it_and_is_broken_is_refused_as_by_the_engine(pool: Pool) -> None:
    node = pool.node()
    node.is_the_trainers()
    file = pool.policies.step()
    data = bytearray(file.path.read_bytes())
    data[-9] ^= 1
    pool.house.upload_as(file.policy, bytes(data), file.kind, file.parent)
    wait_for(lambda: node.advance() or bool(node.trouble), "its refusal")
    assert "leads to" in node.trouble[0]
    assert node.failed == []
    assert node.own_files() == []


def test_a_way_from_elsewhere_leaves_the_old_policy_serving_and_a_later_way_heals_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A parent that is not what serves cannot come by the store's rule; an error of this node's in saying what it has
    is caught by the engine, however often it asks. The policy is not at fault, so it is not told as refused."""
    monkeypatch.setattr(policies, "RETRY_S", 0.05)
    node = pool.node()
    node.is_the_trainers()
    for _ in range(3):
        pool.step()
    node.is_the_trainers()
    pool.step()
    node.puller.next().discard()  # lost on the way: the engine stays behind
    node.puller.puller.serves(pool.newest)  # and this is not true
    serving = node.engine.serving
    pool.step()
    given_up = "not asked for again: policy"
    wait_for(lambda: node.advance() or given_up in caplog.text, "the last try")
    assert "an update changes" in caplog.text
    assert node.engine.serving == serving
    assert serving is not None
    assert node.trouble == node.failed == []
    node.puller.puller.serves(serving)
    pool.step()
    node.is_the_trainers()
