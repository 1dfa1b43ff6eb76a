"""An export that is killed at any instant leaves nothing that looks complete; the next one cleans up."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_fbt.core.tensor_reader import HeldTensors
from megatron_fbt.hf import folder as hf_folder
from megatron_fbt.hf.configuration_fbt import FBTConfig
from tests.unit.hf.exports import LetterTokenizer, export
from tests.unit.hf.reference import random_weights, tiny_config

EMBEDDING = "model.embed_tokens.weight"
INSTANTS = {
    "first tensor": (HeldTensors, "rows", 1),
    "some tensors later": (HeldTensors, "rows", 9),
    "weights written": (LetterTokenizer, "save_for_huggingface", 1),
    "model card": (Path, "write_text", 1),
    "report": (Path, "write_text", 2),
    "configuration": (FBTConfig, "save_pretrained", 1),
    "first rename": (hf_folder.os, "replace", 1),
    "second rename": (hf_folder.os, "replace", 2),
    "earlier export goes": (hf_folder.shutil, "rmtree", 1),
}
"""What is called for the n-th time when the process is killed."""


def killed_export(output, seed, instant, **options):
    """Export in a process of its own that is killed before the call; whether it was."""
    owner, name, count = INSTANTS[instant]
    child = os.fork()
    if child == 0:
        original, calls = getattr(owner, name), []

        def last(*arguments, **keywords):
            calls.append(name)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        try:
            with mock.patch.object(owner, name, last):
                export(output, random_weights(tiny_config(), seed=seed), tiny_config(), **options)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def exported_seed(folder):
    table = load_file(folder / "model.safetensors")[EMBEDDING]
    expected = {
        seed: random_weights(tiny_config(), seed=seed)["embedding.word_embeddings.weight"] for seed in (1, 2, 3)
    }
    return next(seed for seed, weights in expected.items() if torch.equal(weights, table))


@pytest.mark.parametrize("instant", [name for name in INSTANTS if name not in ("second rename", "earlier export goes")])
def test_a_first_export(tmp_path, instant):
    output = tmp_path / "model"
    assert killed_export(output, 1, instant)
    assert not output.exists()
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".model.partial-")
    assert instant == "first rename" or not (left[0] / "config.json").exists()
    export(output, random_weights(tiny_config(), seed=2), tiny_config())
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and exported_seed(output) == 2


@pytest.mark.parametrize("instant", INSTANTS)
def test_an_export_in_place_of_an_earlier_one(tmp_path, instant):
    output = tmp_path / "model"
    export(output, random_weights(tiny_config(), seed=1), tiny_config())
    assert killed_export(output, 2, instant, force=True)
    if instant == "second rename":  # for this instant neither is in its place, and both are whole
        assert not output.exists() and len(list(tmp_path.glob(".model.old-*"))) == 1
    else:
        assert exported_seed(output) == (2 if instant == "earlier export goes" else 1)
        assert (output / "config.json").exists()
    with pytest.raises(hf_folder.ConfigError, match="--force"):
        export(output, random_weights(tiny_config(), seed=3), tiny_config())
    export(output, random_weights(tiny_config(), seed=3), tiny_config(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and exported_seed(output) == 3


def test_what_a_running_export_writes_is_left_alone(tmp_path):
    other = tmp_path / f".model.partial-{hf_folder.socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / ".model.partial-another.host-1"
    another_model = tmp_path / f".model2.partial-{hf_folder.socket.gethostname()}-999999999"
    for folder in (other, elsewhere, another_model):
        folder.mkdir()
    export(tmp_path / "model", random_weights(tiny_config()), tiny_config())
    assert other.exists() and elsewhere.exists() and another_model.exists()


def test_a_link_stays_and_its_folder_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "disk" / "model")
    for seed in (1, 2):
        export(link, random_weights(tiny_config(), seed=seed), tiny_config(), force=True)
        assert link.is_symlink() and exported_seed(tmp_path / "disk" / "model") == seed
    assert [path.name for path in tmp_path.glob("**/.*")] == []
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(hf_folder.ConfigError, match="loop: is a symbolic link to itself"):
        export(tmp_path / "loop", random_weights(tiny_config()), tiny_config())
