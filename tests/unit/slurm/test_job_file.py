"""Job files: defaults, unknown keys, wrong values, fit with the run's configuration."""

import os
import re

import pytest

from megatron_fbt.config.keys import field_types
from megatron_fbt.config.load import FLAGS
from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm.job import JobConfig, time_limit_s
from megatron_fbt.slurm.job_file import describe_fields, load_job, run_dir_of
from megatron_fbt.slurm.render import sbatch_options


@pytest.fixture
def load(tmp_path):
    """A job file from its text."""

    def write(text):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load_job(path)

    return write


def test_fields_have_defaults(load):
    job = load("config: a.yaml\nnodes: 4\ndevices_per_node: 8\nrequeue: {max_failures: 5}\n")
    assert (job.world_size, job.launcher, job.time, job.requeue.max_failures) == (32, "torchrun", "24:00:00", 5)


@pytest.mark.parametrize(
    "text, expected",
    [("24:00:00", "24:00:00"), ("90", "90"), ("1-12:00:00", "1-12:00:00"), ("30:00", "30:00"), ("'20'", "20")],
)
def test_times_stay_as_they_are_written(load, text, expected):
    assert load(f"config: a.yaml\ntime: {text}\n").time == expected


@pytest.mark.parametrize(
    "text, parts",
    [
        ("config: a.yaml\nnode: 2\n", ["node: unknown key", "did you mean nodes?"]),
        ("config: a.yaml\nrequeue: {backof_s: 2}\n", ["requeue.backof_s: unknown key", "backoff_s"]),
        ("config: a.yaml\nrequeue: 3\n", ["requeue = 3: not a section"]),
        ("config: a.yaml\nnodes: 0\n", ["job.nodes = 0: out of range"]),
        ("config: a.yaml\nnodes: two\n", ["job.nodes = 'two': wrong type", "integer"]),
        ("nodes: 2\n", ["job.config = null", "give config or command"]),
        ("config: a.yaml\ncommand: ls\n", ["job.config = 'a.yaml'", "give config or command"]),
        ("config: a.yaml\narray: 0-3\n", ["job.array = '0-3'", "would train in one folder"]),
        ("config: a.yaml\ntime: soon\n", ["job.time = 'soon'", "h:mm:ss"]),
        ("config: a.yaml\nname: a b\n", ["job.name = 'a b'", "plain word"]),
        ("config: a.yaml\npartition: a b\n", ["job.partition = 'a b'", "one plain word"]),
        ("config: a.yaml\naccount: a#b\n", ["job.account = 'a#b'", "one plain word"]),
        ("config: a.yaml\nqos: 'a\\b'\n", ["job.qos", "backslashes"]),
        ("config: a.yaml\nreservation: '\"q\"'\n", ["job.reservation", "quotes"]),
        ("config: a.yaml\nlogs: 'runs/a#1'\n", ["job.logs = 'runs/a#1'"]),
        ("config: a.yaml\ngres: gpu:8\n", ["job.gres = 'gpu:8'", "devices_per_node"]),
        ("config: a.yaml\npython: ''\n", ["job.python = ''", "give a program"]),
        ('config: "a\\nb.yaml"\n', ["config holds a line feed"]),
        ('config: a\ncontainer: {runtime: pyxis, image: i, mounts: ["/a\\n/b"]}\n', ["mounts or options hold"]),
        ("config: a.yaml\nsbatch: [mail]\n", ["job.sbatch", "--mail-type=END"]),
        ("config: a.yaml\nsbatch: ['--comment=issue#5']\n", ["job.sbatch", "without #"]),
        ("config: a.yaml\nsbatch: ['--comment=a b']\n", ["job.sbatch", "two words"]),
        ('config: a.yaml\nsbatch: ["--comment=o\'b"]\n', ["job.sbatch", "two words"]),
        ("config: a.yaml\ntime: 5\n", ["job.time = '5'", "600 s before the end (requeue.signal_s)"]),
        ("config: a.yaml\ntime: '10:00'\n", ["job.time = '10:00'", "at the start of the job"]),
        ("config: a.yaml\ntime: '99999999999999999999'\n", ["no time limit"]),
        ("config: a.yaml\npreflight: {min_free_gb: 1" + "0" * 400 + "}\n", ["min_free_gb", "out of range"]),
        ("config: a.yaml\nnodes: 1" + "0" * 5000 + "\n", ["cannot be read as YAML"]),
        ("[" * 3000, ["cannot be read as YAML"]),
        ("config: a.yaml\ncontainer: {runtime: pyxis}\n", ["container.image = null", "give the image"]),
        ("config: a.yaml\ncontainer: {image: x}\n", ["container.image = 'x'", "set container.runtime"]),
        ("config: a.yaml\nconfig: b.yaml\n", ["given twice"]),
        ("config: a.yaml\nsignal_s: 5\n", ["signal_s: unknown key", "did you mean requeue.signal_s?"]),
        ("config: a.yaml\nzzz: 5\n", ["zzz: unknown key", "--help lists all fields"]),
        ("config: a.yaml\noverrides: [--help]\n", ["job.overrides", "'--help'", "leave it out"]),
        ("config: a.yaml\noverrides: [-h]\n", ["job.overrides", "'-h'", "leave it out"]),
        ("config: a.yaml\noverrides: [--json=true]\n", ["job.overrides", "'--json'", "leave it out"]),
        ("config: a.yaml\noverrides: [--parallel.world_size, '4']\n", ["'--parallel.world_size'", "set nodes"]),
        ("config: a.yaml\npython: python -u\n", ["job.python = 'python -u'", "PYTHONUNBUFFERED"]),
        ("config: a.yaml\nsbatch: ['--nodes=4']\n", ["job.sbatch", "'--nodes'", "set nodes"]),
        ("config: a.yaml\nsbatch: ['-N4']\n", ["job.sbatch", "'-N'", "set nodes"]),
        ("config: a.yaml\nsbatch: ['-p gpu']\n", ["job.sbatch", "'-p'", "set partition"]),
        ("config: a.yaml\nsbatch: ['--chdir /w']\n", ["job.sbatch", "'--chdir'", "set workdir"]),
        ("config: a.yaml\nsbatch: [--no-requeue]\n", ["job.sbatch", "'--no-requeue'", "requeue.max_restarts"]),
        ("- 1\n", ["holds no fields"]),
        ("{", ["cannot be read as YAML"]),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(load, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert all(part in str(caught.value) for part in ["job.yaml", *parts]), str(caught.value)


def test_every_argument_that_ends_the_training_command_is_refused(load):
    for flag in (name for name in FLAGS if name != "config"):
        with pytest.raises(ConfigError, match=re.escape(f"'--{flag}'")):
            load(f"config: a.yaml\noverrides: [--{flag}]\n")


def test_values_of_overrides_are_free(load):
    words = ["--run.dir", "a b", "--feedback.schedule=[{passes: [1]}]", "--config", "more.yaml"]
    assert load(f"config: a.yaml\noverrides: {words}\n").overrides == words


def test_every_option_that_a_script_has_is_refused_in_sbatch(load):
    job = JobConfig(config="a.yaml", partition="p", account="a", qos="q", constraint="c", reservation="r", exclude="e")
    job.gres, job.mem, job.workdir = "gpu", "0", "/w"
    given = [*sbatch_options(job, "logs"), *sbatch_options(JobConfig(command="ls", array="0-1"), "logs")]
    for option in given:
        with pytest.raises(ConfigError, match="job.sbatch"):
            load(f"config: a.yaml\nsbatch: ['{option}']\n")


@pytest.mark.parametrize(
    "option",
    [
        "--out=x",
        "--job=x",
        "-vD /tmp",
        "-Qt5",
        "--part=low",
        "--sig=B:TERM@5",
        "--no-req",
        "--error=x",
        "-e x",
        "--err=x",
    ]
    + ["--wrap=ls", "--test-only", "--parsable", "--help", "-h", "-V", "--version", "--usage", "-", "--", "--=x"],
)
def test_options_that_would_undo_the_script_are_refused_however_they_are_written(load, option):
    with pytest.raises(ConfigError, match="job.sbatch"):
        load(f"config: a.yaml\nsbatch: ['{option}']\n")


def test_help_has_every_field_with_its_type_and_default():
    text = describe_fields()
    assert "\n  nodes (integer, 1)\n      Nodes of the job.\n" in text
    assert "\n  requeue.backoff_s (integer, 60)\n      Seconds until the next start" in text
    assert "\n  workdir (text or null, null)\n" in text
    names = [name for name in field_types(JobConfig) if name not in ("container", "requeue", "preflight")]
    assert re.findall(r"^  (\S+) \(", text, re.MULTILINE) == names
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    "option", ["--mail-type=END", '--comment="two words"', "--mail-type END", "--hold", "-d 41", "-QH"]
)
def test_options_of_sbatch(load, option):
    assert load(f"config: a.yaml\nsbatch: ['{option}']\n").sbatch == [option]


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90", 5400),
        ("30:15", 1815),
        ("2:00:01", 7201),
        ("1-0", 86400),
        ("1-1:30", 91800),
        ("2-00:00:01", 172801),
        ("0", 0),
        ("soon", None),
        ("24:61:00", None),
        ("1-1:60", None),
        ("90:60", None),
        ("90:00", 5400),
        ("٣:00:00", None),
    ],
)
def test_time_limits_in_seconds(text, seconds):
    assert time_limit_s(text) == seconds


def test_only_a_job_that_trains_is_warned(load):
    assert load("command: ls\ntime: 5\n").time == "5" and load("config: a.yaml\ntime: 0\n").time == "0"


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="no such file"):
        load_job("/nowhere/job.yaml")


def test_the_configuration_must_fit_the_number_of_ranks(load, repository, monkeypatch):
    monkeypatch.chdir(repository)
    job = load("config: examples/configs/tiny_cpu.yaml\nnodes: 2\ndevices_per_node: 2\n")
    assert run_dir_of(job) == "runs/quickstart/run"
    job.overrides = ["--run.dir", "runs/other"]
    assert run_dir_of(job) == "runs/other"
    job.nodes = 3
    with pytest.raises(ConfigError, match="6"):
        run_dir_of(job)


def test_paths_of_a_job_are_relative_to_its_folder(load, repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "config: examples/configs/tiny_cpu.yaml\ndevices_per_node: 4\n"
    assert run_dir_of(load(f"{text}workdir: {repository}\n")) == "runs/quickstart/run"
    assert os.getcwd() == str(tmp_path)
    with pytest.raises(ConfigError, match="job.config = 'examples/configs/tiny_cpu.yaml': no such file"):
        run_dir_of(load(text))
    with pytest.raises(ConfigError, match=f"no such file in workdir = '{tmp_path}'"):
        run_dir_of(load(f"{text}workdir: {tmp_path}\n"))


def test_a_configuration_that_names_another_number_of_ranks_is_refused(load, repository, tmp_path, monkeypatch):
    monkeypatch.chdir(repository)
    text = "config: examples/configs/tiny_cpu.yaml\ndevices_per_node: 4\n"
    more = tmp_path / "more.yaml"
    for ranks in (4, "null"):
        more.write_text(f"parallel: {{world_size: {ranks}}}\n")
        assert run_dir_of(load(f"{text}overrides: [--config, {more}]\n")) == "runs/quickstart/run"
    more.write_text("parallel: {world_size: 8}\n")
    with pytest.raises(ConfigError, match="parallel.world_size = 8: .* 4 ranks"):
        run_dir_of(load(f"{text}overrides: [--config, {more}]\n"))
