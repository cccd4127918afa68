import hashlib

import msgspec
import pytest
import torch

from trainer.adapter_init import dense_a, expert_a


def test_linear_modules_share_one_stream_in_order_of_their_paths() -> None:
    widths = {"layers.2.q_proj": 9, "layers.10.q_proj": 4}
    generator = torch.Generator().manual_seed(5)
    expected = {
        name: (torch.rand((3, widths[name]), generator=generator, dtype=torch.float64) * 2 - 1) * widths[name] ** -0.5
        for name in ("layers.10.q_proj", "layers.2.q_proj")
    }
    drawn = dict(dense_a(widths, 3, 5))
    assert list(drawn) == list(expected)
    for name, tensor in drawn.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-15, atol=0)


def test_an_experts_tensor_depends_on_the_seed_and_its_name_alone() -> None:
    name = "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight"
    drawn = expert_a(name, 4, 25, 7)
    number = int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode([7, name]), digest_size=8).digest(), "little")
    generator = torch.Generator().manual_seed(number & (2**63 - 1))
    expected = (torch.rand((4, 25), generator=generator, dtype=torch.float64) * 2 - 1) / 5
    torch.testing.assert_close(drawn, expected, rtol=1e-15, atol=0)
    assert torch.equal(drawn, expert_a(name, 4, 25, 7))
    assert not torch.equal(drawn, expert_a(name, 4, 25, 8))
    assert not torch.equal(drawn, expert_a(name.replace("3", "4"), 4, 25, 7))
    assert float(drawn.abs().max()) <= 1 / 5
    assert float(drawn.std()) == pytest.approx(75**-0.5, rel=0.2)
