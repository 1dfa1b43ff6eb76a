"""The recipe is the same whatever a batch is cut into and whoever computes it."""

import random
from pathlib import Path

import numpy
import pytest
import torch

from megatron_fbt.config.feedback import PrefixConfig
from megatron_fbt.feedback.jitter import jitter_noise
from megatron_fbt.feedback.prefix import fused_positions
from tests.distributed.launch import run_distributed
from tests.distributed.model_case import whole
from tests.distributed.recipe_case import MASKED, VOCAB, D, S, one_process, rows, two_processes
from tests.distributed.run_case import STEPS, rows_of, run, run_config, stop_before, write_corpus


@pytest.fixture(scope="module")
def alone():
    return run_distributed(one_process, 1, timeout=240)[0]


@pytest.fixture(scope="module")
def together():
    return run_distributed(two_processes, 2, timeout=240)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a - b).double().norm() / b.double().norm().clamp_min(1e-30)).item()


def cuts(alone, together, name):
    """Steps of all ranks by {key}, in the layout of a cut."""
    if name.startswith("alone"):
        return [alone["cuts"]], int(name[-1])
    return [rank[name]["cuts"] for rank in together], 1


CUTS = ["alone 4", "alone 1", "tp1pp1dp2", "tp1pp2dp1"]
"""(micro-batch size, accumulation, data parallel) = (4, 1, 1), (1, 4, 1), (1, 2, 2); (1, 4, 1) on two stages."""


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("name", CUTS)
def test_loss_and_gradient_are_means_over_the_loss_tokens_of_the_global_batch(alone, together, name, passes):
    losses, gradients, z_loss = alone["formula"][passes]
    assert (z_loss > 0.1) == (passes > 1)
    ranks, size = cuts(alone, together, name)
    for rank in ranks:
        report = rank[size, passes].report
        assert report.loss_per_pass == pytest.approx(losses, rel=1e-6)
        assert report.z_loss == pytest.approx(z_loss, rel=1e-6)
        assert report.loss_tokens == sum(MASKED) and not report.skipped
    found, expected = (whole(pieces, VOCAB) for pieces in ([r[size, passes].gradients for r in ranks], [gradients]))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.any() or (passes == 1 and key.startswith("fusion.")), key
        assert relative(found[key], value) <= 1e-5 if value.any() else not found[key].any(), key
    norm = sum(value.double().square().sum() for value in expected.values()).sqrt().item()
    assert ranks[0][size, passes].report.grad_norm == pytest.approx(norm, rel=1e-5)


def test_sixteen_passes_over_two_stages_equal_one_process(alone, together):
    stages, expected = [rank["tp1pp2dp1"]["deep"] for rank in together], alone["deep"]
    assert len(set(expected.report.loss_per_pass)) == 16
    for stage in stages:
        assert stage.report.loss_per_pass == pytest.approx(expected.report.loss_per_pass, rel=1e-6)
        assert stage.report.grad_norm == pytest.approx(expected.report.grad_norm, rel=1e-5)
    found = whole([stage.gradients for stage in stages], VOCAB)
    for key, value in whole([expected.gradients], VOCAB).items():
        assert relative(found[key], value) <= 1e-5, key


def test_the_rows_differ_so_much_that_means_of_means_would_show(alone):
    batch, gradients = rows(), [whole([alone["formula"][k][1]], VOCAB) for k in (1, 2)]
    assert batch.loss_mask.sum(1).tolist() == list(MASKED)
    assert (
        relative(gradients[0]["decoder.final_layernorm.weight"], gradients[1]["decoder.final_layernorm.weight"]) > 0.1
    )


@pytest.mark.parametrize("name", CUTS)
def test_a_batch_without_loss_tokens_has_loss_zero_and_only_decays_weights(alone, together, name):
    ranks, _ = cuts(alone, together, name)
    for rank in ranks:
        report = rank["empty"].report
        assert report.loss_per_pass == [0.0, 0.0, 0.0] and report.grad_norm == 0.0 and report.loss_tokens == 0
        assert not report.skipped
    before, after = (
        whole([rank["before"] for rank in ranks], VOCAB),
        whole([r["empty"].weights for r in ranks], VOCAB),
    )
    for key, value in before.items():
        expected = value * (1 - 0.01 * 0.1) if value.dim() == 2 else value
        torch.testing.assert_close(after[key], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("divisible", [1, 8, 128])
@pytest.mark.parametrize("layout", ["alone", "tp2pp1dp1", "tp2pp1dp1+sp"])
def test_padding_of_the_vocabulary_takes_no_part(alone, together, layout, divisible, tied):
    expected = alone["padding"][tied, 1][0]
    ranks = [alone] if layout == "alone" else [rank[layout] for rank in together]
    results = [rank["padding"][tied, divisible] for rank in ranks]
    for number, step in enumerate(expected):
        steps = [result[0][number] for result in results]
        assert steps[0].report.loss_per_pass == pytest.approx(step.report.loss_per_pass, rel=1e-5)
        assert steps[0].report.z_loss == pytest.approx(step.report.z_loss, rel=1e-5)
        assert (step.report.z_loss > 0.1) == (not tied)
        assert steps[0].report.grad_norm == pytest.approx(step.report.grad_norm, rel=1e-4)
        for kind, tolerance in (("gradients", 1e-5 if number == 0 else 1e-3), ("weights", 1e-4)):
            values = whole([getattr(step, kind)], VOCAB)
            found = whole([getattr(s, kind) for s in steps], VOCAB)
            for key, value in values.items():
                assert relative(found[key], value) <= tolerance, (number, kind, key)
    tables = 1 if tied else 2
    sizes = {("alone", 1): 0, ("alone", 8): 1, ("alone", 128): 25}
    padding = sizes.get((layout, divisible), {1: 1, 8: 9, 128: 153}[divisible])
    assert sum(result[1] for result in results) == padding * tables
    assert max(result[2] for result in results) == 0.0, "padded rows stay zero"


@pytest.mark.parametrize("granularity", ["row", "document"])
@pytest.mark.parametrize("pass_number", [2, 3])
def test_all_tensor_parallel_ranks_draw_the_same_jitter_and_cuts(alone, together, pass_number, granularity):
    key, batch = (granularity, pass_number), rows()
    jitter, fused = alone["drawn"][key]
    assert torch.equal(jitter, jitter_noise(0.02, batch.sample_ids, torch.arange(S), pass_number, D, 1234))
    config = PrefixConfig(granularity=granularity)
    assert torch.equal(fused, fused_positions(config, batch.document_starts, batch.sample_ids, pass_number, 1234).t())
    assert fused.any() and jitter.any()
    whole_rows = [rank["tp2pp1dp1"]["drawn"][key] for rank in together]
    shards = [rank["tp2pp1dp1+sp"]["drawn"][key] for rank in together]
    assert all(len(part) == S // 2 for shard in shards for part in shard)
    for number, expected in enumerate((jitter, fused)):
        assert all(torch.equal(rank[number], expected) for rank in whole_rows)
        assert torch.equal(torch.cat([shard[number] for shard in shards]), expected)


def test_a_fused_input_depends_on_the_state_before_it_and_a_document_start_on_none(alone, together):
    (table, fused) = alone["reach"]
    expected = torch.diag_embed(torch.ones(4, S - 1, dtype=torch.bool), offset=-1) & fused[:, :, None]
    assert torch.equal(table, expected)
    starts = rows().document_starts
    assert starts.sum() > 4 and not table[starts].any()
    split = [rank["tp2pp1dp1"]["reach"][0] for rank in together]
    assert all(torch.equal(part, expected) for part in split)
    shards = [rank["tp2pp1dp1+sp"]["reach"][0] for rank in together]
    assert torch.equal(torch.cat([part.any(0, keepdim=True) for part in shards], dim=2), expected.any(0, keepdim=True))


def test_another_first_document_leaves_the_start_of_the_second_as_it_was(alone):
    found, second = alone["document"], 9
    assert rows().document_starts[1].nonzero().flatten().tolist() == [0, second]
    states = (found["states before"] - found["states after"]).abs().amax(1)
    assert states[: second - 1].min() > 1e-3 and states[second - 1] > 1e-4
    assert torch.equal(found["inputs before"][second], found["inputs after"][second])
    assert not torch.equal(found["inputs before"][second + 1], found["inputs after"][second + 1])


def disturb(trainer):
    """Give each rank's global generators a seed of its own, and let rank 1 use its own once more."""
    rank = trainer.layout.pipeline_rank
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1000 * rank + trainer.state.step)
    if rank == 1:
        random.random(), numpy.random.rand(), torch.rand(1)


def disturbed_runs(rank, world_size, folder, corpus):
    """Pass counts of every step on this rank: an undisturbed run, a disturbed one, one stopped and resumed."""
    from megatron_fbt.training import trainer

    plain, counts = trainer.passes_at, []

    def passes_at(*args, **kwargs):
        counts[-1].append(plain(*args, **kwargs))
        return counts[-1][-1]

    def both(step):
        stop = stop_before(step, rank=1)
        return lambda instance: (disturb(instance), stop(instance))[1]

    trainer.passes_at = passes_at
    dropout = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
    runs = [("plain", None, "finished"), ("disturbed", disturb, "finished")]
    runs += [("resumed", both(8), "StoppedBySignal"), ("resumed", disturb, "finished")]
    for name, hook, end in runs:
        counts.append([])
        assert run(run_config(Path(folder) / name, corpus, (1, 2), **dropout), hook) == end
    return counts


def test_pass_counts_agree_whatever_the_generators_are_used_for(tmp_path):
    corpus = write_corpus(tmp_path)
    ranks = run_distributed(disturbed_runs, 2, str(tmp_path), corpus, timeout=200, init_group=False)
    assert ranks[0] == ranks[1]
    plain, disturbed, stopped, resumed = ranks[0]
    assert len(plain) == STEPS and set(plain) == {1, 2, 3}
    assert plain == disturbed == stopped + resumed and len(stopped) == 8
    expected = rows_of(tmp_path / "plain")
    assert [row["passes"] for row in expected] == plain
    assert rows_of(tmp_path / "disturbed") == expected
    assert rows_of(tmp_path / "resumed") == expected
