"""tools/inspect_data.py: documents, rows and counts as text and as JSON, for each format."""

import importlib.util
import io
import json

import numpy
import pytest
import torch

from megatron_fbt.config.load import dump_yaml
from megatron_fbt.core.schedule import Recipe
from megatron_fbt.data.batch import BatchReader, load_micro_batches
from megatron_fbt.data.corpus_stats import DuplicateShare, corpus_stats, draw
from megatron_fbt.data.dataset import build_datasets
from megatron_fbt.data.row_text import LINE, escaped, lines_of
from megatron_fbt.data.tokenizer import HuggingFaceTokenizer
from tests.unit.data.chats import chat, write_chats, write_letter_tokenizer
from tests.unit.data.corpus import data_config, write_documents

LENGTH = 16
READER = BatchReader(None, 0, True, True, torch.device("cpu"))


@pytest.fixture(scope="module")
def tool(repository):
    spec = importlib.util.spec_from_file_location("inspect_data", repository / "tools" / "inspect_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def show(tool, capsys):
    """Runs the tool; exit code, output, errors."""

    def run(*arguments):
        try:
            code = tool.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a letter tokenizer, ten documents (the last three are copies), chats and labelled rows."""
    folder = tmp_path_factory.mktemp("inspect")
    write_letter_tokenizer(folder / "letters")
    tokenizer = HuggingFaceTokenizer(folder / "letters")
    texts = [f"text {n}\nmore {'abcdefg'[n]}" for n in range(7)] + ["text 0\nmore a"] * 3
    documents = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
    write_documents(folder / "corpus", documents, tokenizer.vocab_size)
    write_chats(folder / "chats.jsonl", [chat(f"user: q{n}", "assistant: yes") for n in range(9)])
    row = {"input_ids": [3, 4, 5] + [0] * 13, "labels": [-100, -100, 7] + [-100] * 13, "feedback": [0, 0, 1] + [0] * 13}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return folder


def config_of(place, name, **data):
    config = data_config(place / "run", [place / name], LENGTH, **data)
    config.data.tokenizer.type, config.data.tokenizer.path = "huggingface", str(place / "letters")
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 16, 2
    config.model.num_query_groups, config.model.ffn_hidden_size = 2, 16
    config.training.train_steps, config.training.global_batch_size = 9, 4
    config.training.micro_batch_size, config.training.rampup_batch_size = 1, [2, 2, 4]
    (place / f"{name}.yaml").write_text(dump_yaml(config))
    return config


def test_a_step_that_the_run_has_logged_has_the_samples_that_it_had(place, show):
    config = config_of(place, "corpus")
    log = place / "run" / "metrics.jsonl"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(json.dumps({"step": s, "tokens": 5 * LENGTH * s}) + "\n" for s in (1, 2, 3)))
    try:
        code, output, _ = show("--config", place / "corpus.yaml", "--step", 1, 3, "--json")
        assert code == 0 and [row["row"] for row in json.loads(output)["rows"]] == [*range(5), *range(10, 15)]
        assert config.training.rampup_batch_size == [2, 2, 4]
    finally:
        log.unlink()


def test_rows_are_what_training_reads_and_fuses_in_that_step_and_pass(place, show):
    config = config_of(place, "corpus")
    code, output, _ = show("--config", place / "corpus.yaml", "--step", 2, 3, "--pass_number", 3, "--json")
    rows = json.loads(output)["rows"]
    assert code == 0 and [(row["step"], row["row"]) for row in rows] == [(2, 2), (2, 3), (3, 4), (3, 5), (3, 6), (3, 7)]
    tokenizer = HuggingFaceTokenizer(place / "letters")
    config.model.vocab_size = tokenizer.vocab_size
    data = build_datasets(config, tokenizer, 32, config.training.eval_iters * 4)
    (batch,) = load_micro_batches(data.train, [[row["row"] for row in rows]], tokenizer.eod, READER)
    fused = Recipe(config.feedback, config.run.seed, training=True).fused(batch, 3)
    assert [row["tokens"] for row in rows] == batch.tokens.tolist()
    assert [row["labels"] for row in rows] == batch.labels.tolist()
    assert [row["document_starts"] for row in rows] == batch.document_starts.tolist()
    assert [row["fused"] for row in rows] == fused.tolist() and 0 < fused.sum() < fused.numel()
    code, output, _ = show("--config", place / "corpus.yaml", "--row", 2, "--pass_number", 3)
    starts, region = batch.document_starts[0].tolist(), fused[0].tolist()
    marks = {int(line[:7]): line[8:11] for line in output.splitlines() if line[:7].strip().isdigit()}
    for position, found in marks.items():
        assert found == ("D" if starts[position] else "-") + "L" + ("F" if region[position] else "-")
    assert {t for t in range(LENGTH) if starts[t]} <= set(marks) and r"\<|end|>" in output


def test_assistants_turns_and_labels_of_their_own(place, show):
    config = config_of(place, "chats.jsonl", format="conversations")
    config.feedback.prefix.granularity = "prompt"
    (place / "chats.jsonl.yaml").write_text(dump_yaml(config))
    code, output, errors = show("--config", place / "chats.jsonl.yaml", "--document", 1, "--row", 0)
    assert code == 0, errors
    assert "      0 - |\\<|user|>q1\\<|end|>\\n\n" in output and " A |yes\\<|end|>\n" in output
    assert "DL" not in output and "-LF |" in output and "--F |\\<|end|>" in output
    config = config_of(place, "rows.jsonl", format="labelled")
    config.data.tokenizer.path, config.model.vocab_size = None, 9
    (place / "rows.jsonl.yaml").write_text(dump_yaml(config))
    code, output, errors = show("--config", place / "rows.jsonl.yaml", "--row", 0, "--document", 7)
    assert code == 0, errors
    assert "      2 LF |5" in output and "labels: 7\n" in output and "      0 -- |3 4" in output


def test_counts(place, show):
    arguments = ("--data", place / "corpus", "--tokenizer_type", "huggingface", "--tokenizer_path", place / "letters")
    code, output, _ = show(*arguments, "--stats", "--json")
    stats = json.loads(output)["stats"]
    assert code == 0 and (stats["documents"], stats["tokens"], stats["looked_into"]) == (10, 140, 10)
    assert stats["length"]["histogram"] == [{"from": 8, "below": 16, "documents": 10}]
    assert stats["duplicates_share"] == 0.3 and stats["tokens_per_byte"] == pytest.approx(14 / 13)
    assert (stats["without_end_token"], stats["with_inner_end_token"]) == (0, 0)
    code, output, _ = show(*arguments, "--stats", "--sample", 4, "--document", 2, "--random_documents", 2)
    assert "a sample of 4 documents" in output and "document 2 (number 2 of" in output and output.count("tokens\n") == 3
    code, output, _ = show("--data", place / "corpus", "--document", 0, "--max_tokens", 3)
    assert code == 0 and "and 11 tokens more" in output and "| " not in output.splitlines()[0]


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["--config", "corpus.yaml", "--row", 10**9], 2, "--row 1000000000: there are"),
        (["--config", "corpus.yaml", "--step", 10], 2, "--step 10: training has 9 steps"),
        (["--config", "corpus.yaml", "--row", 0, "--data.nothing", 1], 2, "data.nothing"),
        (["--config", "none.yaml", "--row", 0], 2, "none.yaml"),
        (["--config", "corpus.yaml"], 2, "nothing to show"),
        (["--data", "corpus", "--document", -1], 2, "--document -1: there are 10 documents"),
        (["--data", "corpus", "--row", 1], 2, "rows are those of a run"),
        (["--data", "corpus", "--stats", "--other"], 2, "--other"),
        (["--data", "corpus", "--random_rows", -1], 2, "is negative"),
        (["--data", "absent", "--stats"], 3, "absent.idx: no such file"),
        (["--data", "corpus", "--tokenizer_path", "absent.model", "--stats"], 3, "absent.model"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(place, show, monkeypatch, arguments, code, text):
    config_of(place, "corpus")
    monkeypatch.chdir(place)
    found, _, errors = show(*arguments)
    assert found == code and text in errors.splitlines()[-1] and "Traceback" not in errors


def test_text_without_colour_or_control_characters():
    assert escaped("a\n\t\x1b[1m\u202e\\ü\ud800") == r"a\n\t\x1b[1m\u202e\\ü\ud800"
    lines = lines_of(escaped("word " * 50 + "\n" + "x" * 250 + "\\" * 120))
    assert max(map(len, lines)) <= LINE and "".join(lines) == escaped("word " * 50 + "\n" + "x" * 250 + "\\" * 120)
    assert lines[2].endswith(r"\n") and all(line.count("\\") % 2 == 0 for line in lines[5:])
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    stream.write(escaped("ü"))  # as the tool has standard output
    stream.flush()
    assert stream.buffer.getvalue() == b"\\xfc"


class Numbers:
    """Documents [n // copies]."""

    def __init__(self, count, copies):
        self.lengths, self._copies = numpy.ones(count, dtype=numpy.int32), copies

    def ids(self, number):
        return numpy.array([number // self._copies])


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_copies_are_counted_in_bounded_memory(copies):
    exact, thinned = DuplicateShare(), DuplicateShare(most=100)
    for number in range(5000):
        for counter in (exact, thinned):
            counter.add(Numbers(5000, copies).ids(number))
    assert exact.share == pytest.approx(1 - 1 / copies) and exact.part_of_hashes == 1
    assert thinned.share == pytest.approx(exact.share, abs=1e-9) and thinned.part_of_hashes < 0.2
    stats = corpus_stats(Numbers(5000, copies), None, 50, seed=3)
    assert stats["looked_into"] == 50 and stats["documents"] == 5000
    assert len(draw(1000, 10, 1)) == 10 and draw(1000, 10, 1) == draw(1000, 10, 1) != draw(1000, 10, 2)
    assert draw(7, 6, 1) < set(range(7)) and draw(7, 9, 0) == set(range(7))
