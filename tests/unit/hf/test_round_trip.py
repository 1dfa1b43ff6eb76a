"""Exports as strangers use them: without this package, moved, saved again, two in one process."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_fbt.hf.export import CODE_FILES
from tests.unit.hf.exports import export, load
from tests.unit.hf.reference import Reference, random_weights, tiny_config

IDS = torch.arange(3, 12)

STRANGER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron_fbt", "megatron"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor([[int(i) for i in sys.argv[2].split(",")]])
print(*(model.generate(ids, regime="fused", max_new_tokens=5, do_sample=False)[0, ids.shape[1]:].tolist()))
print(*tokenizer("012", add_special_tokens=False).input_ids)
assert not any(name.split(".")[0] in ("megatron_fbt", "megatron") for name in sys.modules)
"""


def test_works_without_this_package_offline_and_moved(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    made = export(tmp_path / "made", weights, config)
    folder = tmp_path / "v1.5 my-model_x"
    shutil.copytree(made, folder)
    shutil.rmtree(made)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))},
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(STRANGER), str(folder), ",".join(map(str, IDS.tolist()))]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text, tokens = done.stdout.splitlines()[-2:]
    assert [int(token) for token in text.split()] == Reference(weights, config).greedy(IDS, "fused", 5)
    assert tokens == "0 1 2"


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_saved_again_and_loaded_again(tmp_path, tied):
    config = tiny_config(share_embeddings_and_output_weights=tied, qk_layernorm=True, num_query_groups=2)
    weights = random_weights(config)
    first_folder = export(tmp_path / "first", weights, config)
    first = load(first_folder)
    first.save_pretrained(tmp_path / "second")
    AutoTokenizer.from_pretrained(first_folder, trust_remote_code=True).save_pretrained(tmp_path / "second")
    assert all((tmp_path / "second" / name).exists() for name in CODE_FILES)
    second = load(tmp_path / "second")
    left, right = first.state_dict(), second.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(first(IDS[None]).logits, second(IDS[None]).logits)
    for model in (first, second):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    saved = load_file(tmp_path / "second" / "model.safetensors")
    assert ("lm_head.weight" in saved) == (not tied)
    original = load_file(first_folder / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)


@torch.no_grad()
def test_two_exports_with_different_code_in_one_process(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    plain, changed = (export(tmp_path / name, weights, config) for name in ("plain", "changed"))
    code = changed / "modeling_fbt.py"
    source = code.read_text()
    marked = source.replace("logits=self.lm_head(states[-1][:, kept])", "logits=2 * self.lm_head(states[-1][:, kept])")
    assert marked != source
    code.write_text(marked)
    first, second, again = load(plain), load(changed), load(plain)
    logits = first(IDS[None]).logits
    assert torch.equal(second(IDS[None]).logits, 2 * logits)
    assert torch.equal(again(IDS[None]).logits, logits)
