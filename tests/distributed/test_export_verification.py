"""tools/convert_to_hf.py --verify: the training model's logits against the export's, and an export that is wrong."""

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.launch import run_distributed
from tests.distributed.verify_case import VOCAB, verify_all


@pytest.fixture(scope="module")
def verified(tmp_path_factory, repository):
    """{case: exit code, printed, warned, card, report}."""
    folder = tmp_path_factory.mktemp("verified")
    prefix = folder / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    generator = numpy.random.default_rng(0)
    for _ in range(40):
        ids = generator.integers(0, VOCAB - 1, 30)
        ids[-1] = VOCAB - 1
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    (found,) = run_distributed(verify_all, 1, str(folder), str(repository), str(prefix), timeout=280, init_group=False)
    return found


@pytest.mark.parametrize(("case", "passes"), [("fp32", 3), ("llama", 1), ("data", 3)])
def test_an_exact_export_passes_for_every_number_of_passes(verified, case, passes):
    found = verified[case]
    verification = found["report"]["verification"]
    assert found["code"] == 0 and verification["passed"]
    assert [line["passes"] for line in verification["passes"]] == list(range(1, passes + 1))
    for line in verification["passes"]:
        assert 0 < line["max_abs_difference"] < 2e-5 and line["kl"] < 1e-9 and line["top1_agreement"] == 1


@pytest.mark.parametrize("case", ["bf16", "fp16", "llama, bf16"])
def test_rounded_weights_are_judged_by_distributions(verified, case):
    found = verified[case]
    for line in found["report"]["verification"]["passes"]:
        assert 1e-4 < line["max_abs_difference"] < 1 and 1e-10 < line["kl"] < 1e-3 and line["top1_agreement"] > 0.9
    assert found["code"] == 0 and "rounded to" in found["report"]["verification"]["limits"]


@pytest.mark.parametrize("case", ["swapped", "swapped, bf16"])
def test_a_wrong_export_is_told_everywhere(verified, case):
    found = verified[case]
    assert found["code"] == 6 and found["report"]["verification"]["passed"] is False
    assert "NOT PASSED" in found["printed"] and "\nNOT PASSED: " in found["card"]


def test_the_report_is_printed_and_in_the_card(verified):
    found = verified["fp32"]
    assert "3 passes: largest difference" in found["printed"] and "\npassed; " in found["printed"]
    assert "\nPASSED: 512 tokens (random ids: the run's indexed data are not there)" in found["card"]
    assert found["card"].count("| 100.00% |") == 3
    assert "7 steps, 70 rows, 7,000 token-equivalents (K = 1: 85.7%, K = 2: 14.3%)" in found["card"]
    assert "schedule: progressive" in found["card"] and "sequence_length: 64" in found["card"]


def test_validation_rows_are_used_where_they_are(verified):
    assert verified["data"]["report"]["verification"]["source"] == "validation rows of corpus"
    assert "validation rows of corpus" in verified["data"]["card"]


def test_what_a_stock_class_leaves_out_is_told(verified):
    assert "warning: plain mode only: the fusion weights are left out" in verified["llama"]["warned"]
    lines = verified["fp32"]["warned"].splitlines()
    assert [line for line in lines if line.startswith("warning: ")] == []
    assert verified["llama"]["report"]["architecture"] == "Qwen3ForCausalLM"
