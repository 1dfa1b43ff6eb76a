"""The fusion variants against the method's formulas, whole and split over tensor-parallel ranks."""

import pytest
import torch

from megatron_fbt.config.pretrain import PretrainConfig
from tests.distributed.launch import run_distributed

D, S, B, SCALE, EPS = 12, 6, 2, 1.7, 3e-2
KINDS = {
    "gate": ("state_proj", "token_gate"),
    "concat": ("concat_state_proj", "concat_token_proj"),
    "add": ("state_proj", "token_proj"),
}
LAYOUTS = ["tp1", "tp2", "tp2+sp"]


def inputs():
    """W_state, W_token [D, D], tokens and states [S, B, D] (training gives N(e) for tokens; any numbers do here)."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(D, D), (D, D), (S, B, D), (S, B, D)]
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def by_definition(kind, w_state, w_token, tokens, states):
    """Position by position: [S, B, D]; the state before the first position is zero."""
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    if kind == "gate":
        return norm((before @ w_state.T) * torch.sigmoid(tokens @ w_token.T)) * SCALE
    if kind == "add":
        return norm(before @ w_state.T + tokens @ w_token.T) * SCALE
    whole = torch.cat([w_state, w_token], dim=1)  # W_C [D, 2D]
    return norm(torch.cat([norm(before), tokens], dim=-1) @ whole.T) * SCALE


def loss(fused):
    """Of u [S, B, D]; every element has its own weight."""
    return (fused * torch.linspace(-1, 2, fused.numel(), dtype=fused.dtype).view_as(fused)).sum()


def measure(rank, world_size):
    """{(kind, sequence parallel): u and the gradients of this rank's weights and inputs}."""
    from megatron.core import parallel_state

    from megatron_fbt.core.specs import transformer_config
    from megatron_fbt.model.fusion import build_fusion
    from tests.distributed.model_case import Grid, start

    start(Grid(tensor=world_size))
    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    for sequence_parallel in (False, True)[:world_size]:
        config = PretrainConfig()
        config.model.hidden_size, config.model.num_attention_heads, config.model.layernorm_epsilon = D, 2, EPS
        config.precision.dtype = "fp32"
        config.parallel.tensor_model_parallel_size = world_size
        config.parallel.sequence_parallel = sequence_parallel
        for kind, names in KINDS.items():
            fusion = build_fusion(kind, transformer_config(config), SCALE, group)
            *matrices, tokens, states = inputs()
            for name, matrix in zip(names, matrices, strict=True):
                getattr(fusion, name).weight.data.copy_(matrix.chunk(world_size)[rank])
            parts = [x.chunk(world_size)[rank] if sequence_parallel else x for x in (tokens, states)]
            leaves = [part.clone().requires_grad_() for part in parts]
            out = fusion(*leaves)
            shape = out.shape
            weights = torch.linspace(-1, 2, S * B * D).view(S, B, D)
            weights = weights.chunk(world_size)[rank] if sequence_parallel else weights
            (out * weights).sum().backward()
            weight_grads = [getattr(fusion, name).weight.grad for name in names]
            found[kind, sequence_parallel] = {
                "names": [name for name, _ in fusion.named_parameters()],
                "held": sum(p.numel() for p in fusion.parameters()),
                "shape": tuple(shape),
                "u": out.detach(),
                "weights": weight_grads,
                "inputs": [leaf.grad for leaf in leaves],
            }
    return found


@pytest.fixture(scope="module")
def measured():
    one, two = run_distributed(measure, 1), run_distributed(measure, 2)
    return {
        "tp1": [{kind: rank[kind, False] for kind in KINDS} for rank in one],
        "tp2": [{kind: rank[kind, False] for kind in KINDS} for rank in two],
        "tp2+sp": [{kind: rank[kind, True] for kind in KINDS} for rank in two],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_inputs_and_gradients_equal_the_formula(measured, kind, layout):
    leaves = [x.double().requires_grad_() for x in inputs()]
    expected = by_definition(kind, *leaves)
    loss(expected).backward()
    ranks = [rank[kind] for rank in measured[layout]]

    def rows(values):
        """The ranks' sequence parts as one; without sequence parallelism every rank has all."""
        return torch.cat(values) if layout == "tp2+sp" else values[0]

    close = {"rtol": 1e-5, "atol": 2e-6, "check_dtype": False}
    torch.testing.assert_close(rows([rank["u"] for rank in ranks]), expected.detach(), **close)
    for index in range(2):
        weight = torch.cat([rank["weights"][index] for rank in ranks])
        torch.testing.assert_close(weight, leaves[index].grad, **close)
        entering = rows([rank["inputs"][index] for rank in ranks])
        torch.testing.assert_close(entering, leaves[2 + index].grad, **close)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_part_under_the_documented_names(measured, kind, layout):
    for rank in measured[layout]:
        found = rank[kind]
        assert found["names"] == [f"{name}.weight" for name in KINDS[kind]]
        assert found["held"] == 2 * D * D // len(measured[layout])
        assert found["shape"] == ((S // 2 if layout == "tp2+sp" else S), B, D)
