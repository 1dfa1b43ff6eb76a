"""Training a tokenizer: repeatable, of the asked size, and clear about what cannot work."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_fbt.config.data import TokenizerConfig
from megatron_fbt.data.tokenizer import build_tokenizer
from megatron_fbt.data.tokenizer_training import TokenizerTraining, draw_sample, text_pieces, train_tokenizer
from megatron_fbt.errors import ConfigError, DataError


def test_equal_input_gives_an_equal_model_of_the_asked_size(source_folder, tmp_path):
    models = []
    for name in ("a", "b"):
        training = TokenizerTraining(
            [str(source_folder)], str(tmp_path / name), 777, sample_sentences=300, input_format="files"
        )
        report = train_tokenizer(training)
        models.append((tmp_path / f"{name}.model").read_bytes())
        assert report["pieces"] == 300
    assert models[0] == models[1]
    tokenizer = build_tokenizer(TokenizerConfig(path=str(tmp_path / "a.model")))
    assert tokenizer.vocab_size == 777
    assert (tmp_path / "a.vocab").read_text("utf-8").count("\t") == 777


def test_the_sample_is_drawn_from_everything_and_depends_on_the_seed():
    pieces = [str(i) for i in range(1000)]
    sample = draw_sample(iter(pieces), 100, seed=1)
    assert len(set(sample)) == 100 and max(map(int, sample)) > 900
    assert sample == draw_sample(iter(pieces), 100, seed=1) != draw_sample(iter(pieces), 100, seed=2)
    assert draw_sample(iter(pieces), 5000, seed=1) == pieces


def test_pieces_hold_the_whole_text():
    document = "".join(f"line {i}\r\n" for i in range(50)) + "x" * 5000
    assert "".join(text_pieces([document])) == document
    assert max(map(len, text_pieces([document]))) <= 2000


def test_a_vocabulary_too_large_for_the_text_names_both(tmp_path):
    (tmp_path / "text.txt").write_text("a few words only\n")
    training = TokenizerTraining([str(tmp_path)], str(tmp_path / "t"), 5000, input_format="files")
    with pytest.raises(ConfigError, match="--vocab_size 5000 does not fit the text"):
        train_tokenizer(training)
    assert not list(tmp_path.glob("t.*"))


def test_no_text_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(DataError, match="no text to train"):
        train_tokenizer(TokenizerTraining([str(tmp_path)], str(tmp_path / "t")))


def test_parquet_files_of_a_folder_are_read_and_links_told(source_folder, tmp_path, capsys):
    texts = [path.read_text("utf-8") for path in sorted(source_folder.iterdir())]
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "link").symlink_to(source_folder)
    report = train_tokenizer(TokenizerTraining([str(tmp_path / "in")], str(tmp_path / "t"), 500))
    assert report["files"] == 1 and report["characters"] == sum(map(len, texts))
    assert "/in/link: left out, because it is a link to a folder" in capsys.readouterr().err


def test_a_disk_that_refuses_everything_is_a_data_error(source_folder, tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(DataError, match=r"t\.model: cannot be written: Read-only file system"):
        train_tokenizer(TokenizerTraining([str(source_folder)], str(tmp_path / "t"), 500, input_format="files"))


@pytest.mark.parametrize("output", [".", "a/", "n" * 240])
def test_an_output_that_is_no_prefix_is_refused_before_any_training(output):
    with pytest.raises(ConfigError, match="--output"):
        train_tokenizer(TokenizerTraining(["nowhere"], output))
