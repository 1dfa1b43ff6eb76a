"""YAML to configuration and back."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fbt.config.feedback import FeedbackConfig, LossWeightsConfig, PassPhase
from megatron_fbt.config.load import dump_yaml, load_yaml, parse_command_line
from megatron_fbt.config.model import ModelConfig
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.run import RunConfig
from megatron_fbt.config.training import TrainingConfig
from megatron_fbt.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """Write a text to a file and load it."""

    def write_and_load(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_yaml(path)

    return write_and_load


def test_values_and_defaults(load):
    config = load("model: {num_layers: 6, layernorm_epsilon: 1e-3}\noptimizer: {lr: 2E-3}\ndata: {paths: [a, b]}\n")
    assert config == PretrainConfig(
        model=ModelConfig(num_layers=6, layernorm_epsilon=0.001),
        optimizer=dataclasses.replace(PretrainConfig().optimizer, lr=0.002),
        data=dataclasses.replace(PretrainConfig().data, paths=["a", "b"]),
    )


@pytest.mark.parametrize("keys", [("1", "2", "3"), ("'1'", "'2'", "'3'")])
def test_schedule_with_integer_and_text_keys(load, keys):
    one, two, three = keys
    config = load(
        f"feedback:\n  schedule:\n  - {{from_fraction: 0, passes: {{{one}: 1}}}}\n"
        f"  - from_fraction: 5e-1\n    passes:\n      {two}: 0.88\n      {three}: 12e-2\n"
    )
    assert config.feedback.schedule == [PassPhase(0.0, {1: 1.0}), PassPhase(0.5, {2: 0.88, 3: 0.12})]
    assert all(type(count) is int for phase in config.feedback.schedule for count in phase.passes)


PRESETS = ["standard", "progressive", "two_phase_75_25", "full"]


@pytest.mark.parametrize("name", PRESETS)
def test_schedule_by_name(load, name):
    config = load(f"feedback: {{schedule: {name}}}")
    assert config.feedback.schedule == name
    assert load(dump_yaml(config)) == config
    line = ["--training.train_steps", "4", "--model.vocab_size", "9", "--dry_run", "--feedback.schedule", name]
    assert parse_command_line(line)[0].feedback.schedule == name


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("[{from_fraction: 0, passes: {1.5: 1.0}}]", ["feedback.schedule[0].passes: 1.5 is not a whole number"]),
        ("[{from_fraction: 0, passes: {true: 1.0}}]", ["passes: true is not a whole number"]),
        ("[{from_fraction: 0}]", ["feedback.schedule[0] = ", "lacks passes"]),
        ("[{passes: {1: 1}}]", ["lacks from_fraction"]),
        ("[{from_fraction: 0, passes: {1: 1}, more: 1}]", ["feedback.schedule[0].more: unknown key"]),
    ],
)
def test_phases_are_whole_in_files_and_on_the_command_line(load, schedule, parts):
    with pytest.raises(ConfigError) as from_file:
        load(f"feedback: {{schedule: {schedule}}}")
    with pytest.raises(ConfigError) as from_line:
        parse_command_line(["--dry_run", "--model.vocab_size", "9", "--feedback.schedule", schedule])
    for error in (from_file, from_line):
        assert [part for part in parts if part not in str(error.value)] == [], error.value


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {num_layer: 2}", ["model.num_layer", "did you mean model.num_layers?"]),
        ("modl: {num_layers: 2}", ["modl", "did you mean model?"]),
        ("model.num_layers: 2", ["model.num_layers"]),
        ("feedback: {jitter: {scal: 0.1}}", ["feedback.jitter.scal", "feedback.jitter.scale"]),
        ("feedback: {schedule: [{from_fraction: 0, pases: {1: 1}}]}", ["feedback.schedule[0].pases", "passes?"]),
        ("feedback: {schedule: [{from_fraction: 0, passes: {one: 1}}]}", ["feedback.schedule", "one"]),
        ("feedback: {schedule: 3}", ["feedback.schedule = 3: ", *PRESETS, "list of {from_fraction: number"]),
        ("feedback: {schedule: ful}", ["feedback.schedule = ful: ", *PRESETS, "list of {from_fraction: number"]),
        ("model: {num_layers: 2.5}", ["model.num_layers = 2.5", "integer"]),
        ("model: {num_layers: two}", ["model.num_layers = two", "integer"]),
        ("model: {qk_layernorm: 3}", ["model.qk_layernorm", "true or false"]),
        ("model: {input_norm: rmsnorm}", ["model.input_norm = rmsnorm", "one of rms, none"]),
        ("optimizer: {lr: fast}", ["optimizer.lr = fast", "number"]),
        ("run: {dir: 5}", ["run.dir = 5", "text"]),
        ("data: {paths: corpus}", ["data.paths = corpus", "list of text"]),
        ("optimizer: {lr: ''}", ["optimizer.lr = ''", "number"]),
        ("model: {num_layers: '  '}", ["model.num_layers = ", "integer"]),
        (f"memory: {{loss_chunk_mib: 1{'0' * 400}}}", ["too many digits"]),
        ("model:", ["model = null", "remove it"]),
        ("model: 3", ["model = 3"]),
        ("", ["holds no sections"]),
        ("- 1", ["holds no sections"]),
        ("model: {num_layers: 2", ["cannot be read as YAML", "line"]),
        ("model:\n  num_layers: 2\n  num_layers: 4\n", ["'num_layers' is given twice", "line"]),
        ("dry_run: true", ["dry_run: unknown key"]),
        ("config: other.yaml", ["config: unknown key"]),
    ],
)
def test_refused(load, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(text)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert ";" in message


@pytest.mark.parametrize(
    "field", ["memory.loss_chunk_mib", "feedback.prefix.low", "optimizer.lr", "training.train_steps"]
)
@pytest.mark.parametrize("empty", ["", '""', " "])
def test_an_empty_value_is_named(field, empty):
    line = ["--training.train_samples", "4", "--model.vocab_size", "9", "--dry_run"]
    for arguments in ([f"--{field}", empty], [f"--{field}={empty}"]):
        with pytest.raises(ConfigError, match=rf"{field} = ['\"]+.*; give "):
            parse_command_line([*line, *arguments])


@pytest.mark.parametrize(
    "field, value",
    [
        ("memory.loss_chunk_mib", "1e303"),
        ("memory.loss_chunk_mib", "1e10"),
        ("memory.budget_gib", "1e308"),
        ("feedback.prefix.exponent", "1e308"),
        ("feedback.prefix.exponent", "1e7"),
    ],
)
def test_numbers_beyond_all_reason_are_refused(field, value):
    line = ["--training.train_steps", "4", "--model.vocab_size", "9", "--dry_run", f"--{field}", value]
    with pytest.raises(ConfigError) as caught:
        parse_command_line(line)
    assert f"{field} = {float(value)}: out of range; give a finite number above 0 and at most" in str(caught.value)


def test_all_unknown_keys_at_once(load):
    with pytest.raises(ConfigError) as caught:
        load("model: {num_layer: 2, hiden_size: 3}\nlog: {}\n")
    assert [name for name in ("num_layer", "hiden_size", "log") if name not in str(caught.value)] == []


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="binary.yaml"):
        load_yaml(path)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12),
    st.sampled_from(
        ["1e3", "1.0", "null", "true", "yes", "0x1", "12_0", "2020-01-01", "a: b", "#x", "'", '"', " x ", "~"]
    ),
)


@settings(max_examples=25, deadline=None)
@given(text=TEXTS, number=FLOATS, weights=st.none() | st.lists(FLOATS, max_size=3), passes=st.dictionaries(
    st.integers(1, 16), FLOATS, min_size=1, max_size=3
))  # fmt: skip
def test_round_trip_is_exact(tmp_path_factory, text, number, weights, passes):
    config = PretrainConfig(run=RunConfig(dir=text))
    config.data.paths = [text, "plain"]
    config.data.split = text
    config.optimizer.lr = number
    config.feedback = FeedbackConfig(
        schedule=[PassPhase(number, passes)], loss_weights=LossWeightsConfig(per_pass=weights), input_scale=number
    )
    path = tmp_path_factory.mktemp("round_trip") / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    loaded = load_yaml(path)
    assert loaded == config
    assert dump_yaml(loaded) == dump_yaml(config)


def test_round_trip_of_defaults(load):
    text = dump_yaml(PretrainConfig())
    assert load(text) == PretrainConfig()
    assert "layernorm_epsilon: 1.0e-05" in text


def test_configurations_read_one_after_the_other_share_nothing(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("training: {train_steps: 10}\n")
    first = load_yaml(path)
    first.data.paths.append("corpus")
    first.feedback.prefix.probability, first.model.num_layers = 0.5, 2
    second = load_yaml(path)
    assert second.data.paths == [] and second == PretrainConfig(training=TrainingConfig(train_steps=10))
