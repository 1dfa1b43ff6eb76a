"""Weights on their way from a checkpoint into safetensors files: their bytes, the memory they take, progress."""

import io
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save

from megatron_fbt.core.tensor_reader import HeldTensors
from megatron_fbt.errors import CheckpointError, ConfigError
from megatron_fbt.hf import stream
from megatron_fbt.hf.stream import ByteProgress, plan_shards, write_weights
from megatron_fbt.hf.weights import hf_tensors, to_hf_weights
from tests.unit.hf.checkpoints import write_checkpoint
from tests.unit.hf.reference import random_weights, tiny_config

MB = 1 << 20
CONVERT = """
import json, sys
from megatron_fbt.hf.convert import Conversion, convert_checkpoint

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))

found = [kilobytes("VmHWM") * 1024]
for dtype in ("bf16", "fp32"):
    report = convert_checkpoint(sys.argv[1], f"{sys.argv[2]}/{dtype}", Conversion(dtype=dtype, max_shard_size="32MB"))
    found += [kilobytes("VmHWM") * 1024, report["bytes"]]
print(json.dumps(found))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_are_those_that_safetensors_writes(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(stream, "PIECE_BYTES", 1000)  # several pieces a tensor
    config = tiny_config(num_query_groups=2, add_qkv_bias=True, qk_layernorm=True)
    weights = random_weights(config)
    plan = plan_shards(list(hf_tensors(config, 50)), dtype, "25KB")
    write_weights(HeldTensors(weights), plan, dtype, tmp_path)
    converted = {name: tensor.to(dtype) for name, tensor in to_hf_weights(weights, config).items()}
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in converted.values())
    for path in files:
        names = [name for name, file in index["weight_map"].items() if file == path.name]
        assert path.read_bytes() == save({name: converted.pop(name) for name in names}, metadata={"format": "pt"})
    assert not converted


def test_a_shard_size_without_a_meaning_is_refused():
    with pytest.raises(ConfigError, match="max_shard_size='big'"):
        plan_shards(list(hf_tensors(tiny_config(), 50)), torch.float32, "big")


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["decoder.layers.1.mlp.linear_fc2.weight"][3, 4] = 70000.0
    plan = plan_shards(list(hf_tensors(config, 50)), torch.float16, "5GB")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.linear_fc2.weight: float16 cannot hold 70000"):
        write_weights(HeldTensors(weights), plan, torch.float16, tmp_path)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 400 MB, one of its tensors 128 MB large."""
    folder = tmp_path_factory.mktemp("large")
    config = tiny_config(num_layers=5, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, kv_channels=128)
    config.model.vocab_size = 32768
    config.data.format = "labelled"  # needs no tokenizer
    weights = {name: torch.zeros(1).expand(w.shape) for name, w in random_meta(config).items()}
    assert 380 * MB < sum(weight.numel() * 4 for weight in weights.values()) < 480 * MB
    write_checkpoint(folder / "step_00000001", {name: w.contiguous() for name, w in weights.items()}, config)
    return folder / "step_00000001"


def random_meta(config):
    """Shapes of the canonical weights."""
    from megatron_fbt.hf.weights import canonical_shapes

    return {name: torch.empty(shape, device="meta") for name, shape in canonical_shapes(config, 32768)}


def test_memory_does_not_grow_with_the_model(large, tmp_path):
    command = [sys.executable, "-c", CONVERT, str(large), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    before, peak_bf16, size_bf16, peak_fp32, size_fp32 = json.loads(done.stdout.splitlines()[-1])
    assert size_bf16 > 190 * MB and size_fp32 > 380 * MB
    for dtype, largest, peak in (("bf16", 64 * MB, peak_bf16), ("fp32", 128 * MB, peak_fp32)):
        sizes = [path.stat().st_size for path in (tmp_path / dtype).glob("*.safetensors")]
        assert len(sizes) > 5 and largest <= max(sizes) < largest + MB, "a file of its own for the largest tensor"
        assert peak < 1.3 * max(sizes) + 1024 * MB, "the promise"
        assert peak - before < 150 * MB, "pieces: the model is larger, and so are its tensor and one more copy of it"


def test_progress_has_a_remaining_time_and_is_silent_for_short_work(monkeypatch):
    seconds = iter([0.0, 1.0, 4.0, 5.0, 20.0])
    monkeypatch.setattr(stream.time, "monotonic", lambda: next(seconds))
    shown = io.StringIO()
    progress = ByteProgress(100_000_000, shown)
    for _ in range(4):
        progress.add(20_000_000)
    progress.end()
    assert shown.getvalue().splitlines() == [
        " 40%  40 of 100 MB  10 MB/s  ETA 0:00:06",
        " 80%  80 of 100 MB  4 MB/s  ETA 0:00:05",
    ]


def test_a_shard_of_the_index_can_be_read_alone(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    write_weights(
        HeldTensors(weights), plan_shards(list(hf_tensors(config, 50)), torch.float32, "60KB"), torch.float32, tmp_path
    )
    place = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(load_file(tmp_path / place[name])[name], to_hf_weights(weights, config)[name])
