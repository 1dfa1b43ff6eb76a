"""Sources and stages: read from YAML, written back, and refused with field, value and remedy where they cannot be."""

import pytest

from megatron_fbt.config.checks import validate_config, validate_for_training
from megatron_fbt.config.load import dump_yaml, load_yaml, parse_command_line
from megatron_fbt.config.plan import make_plan
from megatron_fbt.config.sources import SourceConfig, StageConfig
from megatron_fbt.errors import ConfigError

TEXT = """
data:
  sources:
  - {name: web, paths: [data/web.manifest.json, "data/more-*.bin"], weight: 0.7}
  - {name: math, paths: [data/math], weight: 3, max_epochs: 4}
  - {name: books, paths: [data/books], tokens: 2.0e3, split: "99,1,0"}
  - {name: held, paths: [data/held], weight: 1, split: "0,1,0"}
  stages:
  - {first_step: 0}
  - {first_step: 10, weights: {web: 0.3, math: 0.7}}
  tokenizer: {path: some.model}
training: {train_steps: 20}
model: {vocab_size: 100}
"""


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        return load_yaml(tmp_path / "config.yaml")

    return write_and_load


def test_sources_and_stages_are_read_and_written(load):
    config = load(TEXT)
    validate_config(config)
    validate_for_training(config)
    assert config.data.sources == [
        SourceConfig("web", ["data/web.manifest.json", "data/more-*.bin"], 0.7),
        SourceConfig("math", ["data/math"], 3, max_epochs=4),
        SourceConfig("books", ["data/books"], tokens=2000.0, split="99,1,0"),
        SourceConfig("held", ["data/held"], 1, split="0,1,0"),
    ]
    assert config.data.stages == [StageConfig(0), StageConfig(10, {"web": 0.3, "math": 0.7})]
    assert load(dump_yaml(config)) == config


def test_sources_on_a_command_line():
    sources = "[{name: a, paths: [x], weight: 1}, {name: b, paths: [y], tokens: 16000}]"
    line = ["--training.train_tokens", "20000", "--model.vocab_size", "9", "--dry_run", f"--data.sources={sources}"]
    config, _ = parse_command_line([*line, "--data.stages", "[{first_step: 0}]"])
    assert [source.name for source in config.data.sources] == ["a", "b"] and config.data.stages == [StageConfig(0)]
    with pytest.raises(
        ConfigError, match=r"data\.sources\[0\]\.wait: unknown key; did you mean data.sources\[0\].weight"
    ):
        parse_command_line([*line[:-1], "--data.sources=[{name: a, paths: [x], wait: 1}]"])


CHANGES = [
    ("weight: 0.7", "weight: 0", r"data\.sources\[0\]\.weight = 0.0: out of range; give a finite number above 0"),
    ("weight: 0.7", "weight: -1", r"data\.sources\[0\]\.weight = -1"),
    ("weight: 0.7", "weight: .nan", r"data\.sources\[0\]\.weight = nan"),
    ("weight: 0.7", "weight: .inf", r"data\.sources\[0\]\.weight = inf"),
    ("weight: 0.7", "tokens: 0", r"data\.sources\[0\]\.tokens = 0"),
    ("weight: 0.7", "weight: 1, tokens: 5", r"weight = 1.0 and tokens = 5.0, and exactly one .*; set one"),
    (", weight: 0.7", "", "weight = None and tokens = None"),
    ("max_epochs: 4", "max_epochs: 0", r"data\.sources\[1\]\.max_epochs = 0"),
    ("name: math", "name: web", "the name web is there more than once; give each source another name"),
    ("name: math", "name: ' '", r"data\.sources\[1\]\.name = ' ': empty"),
    ("paths: [data/math]", "paths: []", r"data\.sources\[1\]\.paths = \[\]: names nothing"),
    ("paths: [data/math]", "paths: [./data/books]", "the path data/books is there more than once; name it once"),
    (
        "tokens: 2.0e3",
        "tokens: 2.0e9",
        r"budgets of 2,000,000,000 tokens in all, and the stages without .* have 81,920",
    ),
    ("weight: 1, split", "tokens: 7, split", "a budget of training tokens, but split leaves none; give a weight"),
    ("math: 0.7}", "math: 0}", r"data\.stages\[1\]\.weights .*: a weight is zero"),
    ("math: 0.7}", "math: .nan}", "a weight is zero, negative or not a finite number"),
    ("weights: {web: 0.3, math: 0.7}", "weights: {}", "or there is none"),
    (
        "math: 0.7}",
        "maths: 1}",
        r"data\.stages\[1\]\.weights: no source is called 'maths'; data\.sources has web, math",
    ),
    ("math: 0.7}", "books: 1}", "'books' has a budget of tokens, which is spent in stages without weights"),
    ("math: 0.7}", "held: 1}", "the split of 'held' leaves it nothing for training"),
    ("first_step: 0}", "first_step: 1}", r"data\.stages\[0\]\.first_step = 1: the first stage begins the run"),
    ("first_step: 10", "first_step: 0", r"the stages begin at steps \[0, 0\]; sort them"),
    ("first_step: 10", "first_step: -1", r"data\.stages\[1\]\.first_step = -1: out of range"),
    ("{first_step: 0}", "{first_step: 0, weights: {web: 1}}", "the tokens of books are never spent"),
    ("  sources:", "  paths: [data/other]\n  sources:", r"data\.paths = \['data/other'\]: data\.sources is set, too"),
    ("  sources:", "  weights: [1.0]\n  sources:", r"data\.weights = \[1\.0\]"),
    ("  sources:", "  format: labelled\n  sources:", "only indexed data sets are mixed, and data.format is 'labelled'"),
]


@pytest.mark.parametrize("before, after, message", CHANGES)
def test_what_makes_no_sense_is_refused(load, before, after, message):
    assert TEXT.count(before) == 1, before
    with pytest.raises(ConfigError, match=message):
        validate_config(load(TEXT.replace(before, after)))


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "1,1,1,1", "", "0,0,1"])
def test_impossible_splits_of_a_source_are_refused_with_their_text(load, split):
    with pytest.raises(ConfigError) as caught:
        validate_config(load(TEXT.replace('"99,1,0"', f'"{split}"')))
    assert f"data.sources[2].split = {split!r}" in str(caught.value)


def test_blanks_in_a_split_do_not_matter(load):
    validate_config(load(TEXT.replace('"99,1,0"', '"969, 30, 1"')))


def test_stages_need_sources_and_sources_something_to_train_on(load):
    with pytest.raises(ConfigError, match=r"data\.stages: there are no sources"):
        validate_config(load("data: {stages: [{first_step: 0}]}\ntraining: {train_steps: 5}"))
    only_held = "data: {sources: [{name: a, paths: [x], weight: 1, split: '0,1,0'}]}\ntraining: {train_steps: 5}"
    with pytest.raises(ConfigError, match="no split leaves anything for training"):
        validate_config(load(only_held))


def test_a_stage_that_is_never_reached_is_noted(load):
    config = load(TEXT.replace("train_steps: 20", "train_steps: 10"))
    notes = make_plan(config, 1, 100).notes
    assert [note for note in notes if "data.stages" in note] == [
        "data.stages[1] is never reached: it begins after step 10, and the run ends after step 10"
    ]
    assert not [note for note in make_plan(load(TEXT), 1, 100).notes if "data." in note]
