"""The copy of a run's tokenizer: whole, of the run that is, and enough for what reads a checkpoint."""

import shutil
from pathlib import Path

import pytest

from megatron_fbt.config.data import DataConfig, TokenizerConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.data.chat import PLAIN_TEMPLATE
from megatron_fbt.data.stored_tokenizer import checkpoint_tokenizer, store_tokenizer, stored_path
from megatron_fbt.data.token_ids import TokenIds
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.errors import CheckpointError, DataError

TEXT = "def main(x):\n    return x  # é"


@pytest.fixture(params=["huggingface", "sentencepiece"])
def source(request, tmp_path, sentencepiece_model, huggingface_folder):
    """A tokenizer's own place, as a configuration names it."""
    if request.param == "sentencepiece":
        return TokenizerConfig("sentencepiece", str(shutil.copy(sentencepiece_model, tmp_path / "source.model")))
    folder = shutil.copytree(huggingface_folder, tmp_path / "source")
    (folder / "model.safetensors").write_bytes(b"weights, which nobody wants twice")
    return TokenizerConfig("huggingface", str(folder))


def remove(source):
    path = Path(source.path)
    path.unlink() if path.is_file() else shutil.rmtree(path)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_copy_is_enough(source, tmp_path):
    config = PretrainConfig()
    config.data.tokenizer = source
    original = build_tokenizer(source)
    store_tokenizer(original, config.data, tmp_path / "copy")
    remove(source)
    again = checkpoint_tokenizer(tmp_path / "copy", config)
    assert again.tokenize(TEXT) == original.tokenize(TEXT) and again.eod == original.eod
    assert again.unique_identifiers == original.unique_identifiers
    assert config.data.tokenizer is source and "model.safetensors" not in names(tmp_path / "copy")
    assert names(tmp_path) == {"copy"}


def test_a_checkpoint_without_a_copy_uses_the_runs_own(source, tmp_path):
    config = PretrainConfig()
    config.data.tokenizer = source
    (tmp_path / "old").mkdir()
    assert stored_path(tmp_path / "old", config.data) is None
    assert checkpoint_tokenizer(tmp_path / "old", config).vocab_size == build_tokenizer(source).vocab_size
    remove(source)
    with pytest.raises(DataError, match="source"):
        checkpoint_tokenizer(tmp_path / "old", config)


def test_another_place_comes_first(source, tmp_path, sentencepiece_model, huggingface_folder):
    config = PretrainConfig()
    config.data.tokenizer = source
    store_tokenizer(build_tokenizer(source), config.data, tmp_path / "copy")
    other = sentencepiece_model if source.type == "sentencepiece" else huggingface_folder
    assert checkpoint_tokenizer(tmp_path / "copy", config, str(other)).path.samefile(other)
    assert not checkpoint_tokenizer(tmp_path / "copy", config).path.samefile(other)


@pytest.mark.parametrize("own", [True, False])
def test_the_template_of_conversations_is_stored(source, tmp_path, own):
    config = PretrainConfig()
    config.data.tokenizer, config.data.format = source, "conversations"
    template = PLAIN_TEMPLATE
    if own:
        (tmp_path / "mine.jinja").write_text(template := "{{ messages | length }} é\n", encoding="utf-8")
        config.data.chat_template = str(tmp_path / "mine.jinja")
    store_tokenizer(build_tokenizer(source), config.data, tmp_path / "copy")
    remove(source)
    (tmp_path / "mine.jinja").unlink(missing_ok=True)
    assert checkpoint_tokenizer(tmp_path / "copy", config).saved_chat_template == template


def test_a_copy_follows_the_run(source, tmp_path, sentencepiece_model):
    data = DataConfig()
    store_tokenizer(build_tokenizer(source), data, tmp_path / "copy")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "copy").iterdir()}
    store_tokenizer(build_tokenizer(source), data, tmp_path / "copy")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "copy").iterdir()} == before
    copied = tmp_path / "copy" / "tokenizer.model" if source.type == "sentencepiece" else tmp_path / "copy"
    store_tokenizer(build_tokenizer(TokenizerConfig(source.type, str(copied))), data, tmp_path / "copy")
    assert names(tmp_path / "copy") == set(before), "a run may name its own copy"
    (tmp_path / ".copy.tmp").mkdir()  # of a run that was killed
    store_tokenizer(build_tokenizer(TokenizerConfig(path=sentencepiece_model)), data, tmp_path / "copy")
    assert names(tmp_path / "copy") == {"tokenizer.model"} and not (tmp_path / ".copy.tmp").exists()
    store_tokenizer(TokenIds(50), data, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_copy_that_cannot_be_made(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot copy the tokenizer"):
        store_tokenizer(build_tokenizer(source), DataConfig(), tmp_path / "file" / "copy")
