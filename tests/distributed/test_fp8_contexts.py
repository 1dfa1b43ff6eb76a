"""FP8 contexts by layer, pass and recompute, and when weights are quantised, under the Transformer Engine backend."""

from collections import Counter

import pytest

from tests.distributed.fp8_context_case import MICRO_BATCHES, Entry, record
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import Case, Grid

EDGES = {"precision.num_layers_at_start_in_bf16": 1, "precision.num_layers_at_end_in_bf16": 1}
CASES = [
    Case("plain", {}, (1, 3)),
    Case("full", {"memory.recompute": "full"}, (1, 2)),
    Case("selective", {"memory.recompute": "selective"}, (2,)),
    Case("edges", {**EDGES, "memory.recompute": "full", "precision.fp8_recipe": "blockwise"}, (3,)),
    Case("early", {"memory.recompute": "full", "memory.recompute_passes": "early"}, (3,)),
    Case("delayed", {"precision.fp8_recipe": "delayed"}, (2,)),
    Case("fusion", {"precision.fp8_fusion": True}, (3,)),
]
KEYS = [(case.name, passes) for case in CASES for passes in case.passes]
GRIDS = [Grid(), Grid(pipeline=2)]
PRODUCTS = 4
"""Of a layer in a pass: queries, keys and values; projection; both of the MLP."""


@pytest.fixture(scope="module")
def seen():
    """What each rank saw, by grid."""
    return {str(grid): run_distributed(record, grid.world_size, grid, CASES, timeout=200) for grid in GRIDS}


def recomputed_passes(name, passes):
    return {"full": passes, "edges": passes, "early": passes - 1}.get(name, 0)


def low_layers(name):
    return [1, 2] if name == "edges" else [0, 1, 2, 3]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name, passes", KEYS)
def test_recipe_entries_of_each_layer_pass_and_recompute(seen, grid, name, passes):
    found = Counter()
    for rank in seen[str(grid)]:
        found.update(rank[name, passes, False].entered)
    recipe = {"delayed": "delayed", "edges": "blockwise"}.get(name, "tensorwise")
    expected = Counter()
    if name == "delayed":  # one context around each stage's layers
        expected[Entry("delayed", -1), False] = MICRO_BATCHES * passes * grid.pipeline
    else:
        for layer in low_layers(name):
            expected[Entry(recipe, layer), False] = MICRO_BATCHES * passes
            again = passes if name == "selective" else recomputed_passes(name, passes)  # attention alone
            expected[Entry(recipe, layer), True] = MICRO_BATCHES * again
    if name == "fusion":  # state and token, in every pass but the first
        expected[Entry(recipe, -1), False] = MICRO_BATCHES * (passes - 1) * 2
    assert found == +expected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name, passes", KEYS)
def test_every_product_runs_in_the_context_of_its_layer_also_when_recomputed(seen, grid, name, passes):
    counts = Counter()
    for rank in seen[str(grid)]:
        for place, context, recomputed, _ in rank[name, passes, False].products:
            if place.startswith("fusion"):
                assert context == Entry("tensorwise", -1)
                continue
            first, own = place.split(".")[2].split("+")
            layer = int(first) + int(own)
            counts[layer, recomputed] += 1
            if name == "delayed":
                assert context == Entry("delayed", -1)
            else:
                assert (context is None) == (layer not in low_layers(name))
                assert context is None or context.layer == layer
    for layer in range(4):
        assert counts[layer, False] == PRODUCTS * MICRO_BATCHES * passes
        assert counts[layer, True] == PRODUCTS * MICRO_BATCHES * recomputed_passes(name, passes)


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "validation"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name, passes", KEYS)
def test_weights_are_quantised_at_their_first_use_in_a_step_alone(seen, grid, name, passes, forward_only):
    """In each step: the one before has used the same weights' older values."""
    for rank in seen[str(grid)]:
        used = set()
        for place, _, recomputed, quantised in rank[name, passes, forward_only].products:
            assert quantised == (place not in used) and not (quantised and recomputed)
            used.add(place)
        assert used
