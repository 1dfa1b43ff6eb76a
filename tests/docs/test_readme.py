"""README.md says what is: its commands run, its paths, fields, exit codes and versions exist."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from megatron_fbt import errors
from megatron_fbt.config.keys import field_types
from megatron_fbt.config.load import parse_command_line
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.errors import FBTError
from megatron_fbt.hf.configuration_fbt import REGIMES
from megatron_fbt.inference.native.__main__ import build_parser as native_parser
from megatron_fbt.launch import build_parser
from megatron_fbt.preflight import build_parser as preflight_parser
from tests.docs import readme
from tests.unit.data.test_inputs import BAD_LINES

LINES = readme.command_lines()
PRETRAIN = "python -m megatron_fbt.pretrain "
NATIVE = "python -m megatron_fbt.inference.native"
PREFLIGHT = "python -m megatron_fbt.preflight"
INSTANT = ("--help", "--print_config", "--dry_run")
LAUNCHERS = {"torchrun": get_args_parser, "python -m megatron_fbt.launch": build_parser}
FIELDS = field_types()
SECTIONS = vars(PretrainConfig())


def run(repository, line, folder=None):
    """Run a command line of the README with this interpreter."""
    arguments = shlex.split(line)
    arguments[:1] = [sys.executable] if arguments[0] == "python" else arguments[:1]
    return subprocess.run(arguments, cwd=folder or repository, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def help_of(repository):
    """Text of a tool's --help."""
    found = {}

    def ask(tool):
        if tool not in found:
            result = run(repository, f"python {tool} --help")
            assert result.returncode == 0, result.stderr
            found[tool] = result.stdout
        return found[tool]

    return ask


def test_two_commands_come_first():
    assert readme.blocks("bash")[0] == "bash examples/quickstart.sh\nbash tests/run.sh\n"
    assert len(readme.text().splitlines()) <= 350


@pytest.mark.parametrize("block", readme.blocks("bash"), ids=lambda block: block.splitlines()[0][:40])
def test_blocks_are_valid_shell(block):
    result = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(PRETRAIN)])
def test_instant_commands_run(repository, line):
    assert any(flag in shlex.split(line) for flag in INSTANT), f"cannot be run in an instant: {line}"
    result = run(repository, line)
    assert result.returncode == 0, result.stderr
    if "--json" in line:
        assert json.loads(result.stdout)["world_size"] == 64
    assert result.stdout and "Traceback" not in result.stderr


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(tuple(LAUNCHERS))])
def test_launched_commands_are_accepted(repository, monkeypatch, line):
    launcher = next(name for name in LAUNCHERS if line.startswith(name))
    arguments = LAUNCHERS[launcher]().parse_args(shlex.split(line.removeprefix(launcher)))
    if arguments.training_script == "megatron_fbt.inference.native":
        found = native_parser().parse_args(arguments.training_script_args)
        processes = found.tensor_model_parallel_size * found.pipeline_model_parallel_size
        assert arguments.module and processes == int(arguments.nproc_per_node)
        return
    assert (arguments.module, arguments.training_script) == (True, "megatron_fbt.pretrain")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("WORLD_SIZE", arguments.nproc_per_node)
    config, _ = parse_command_line(arguments.training_script_args)
    assert config.data.paths and config.data.tokenizer.path


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("python tools/")])
def test_tools_have_the_options(help_of, line):
    tool, *arguments = shlex.split(line)[1:]
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    known = set(re.findall(r"--\w+", help_of(tool)))
    assert options and options <= known or tool == "tools/corpus_entropy.py"
    assert re.search(r"^examples?:", help_of(tool), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(NATIVE)])
def test_commands_of_one_process_are_accepted(line):
    found = native_parser().parse_args(shlex.split(line.removeprefix(NATIVE)))
    assert found.tensor_model_parallel_size * found.pipeline_model_parallel_size == 1


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(PREFLIGHT)])
def test_preflight_commands_are_accepted(line):
    assert preflight_parser().parse_args(shlex.split(line.removeprefix(PREFLIGHT))).run_dir


def test_every_other_command_is_known(repository):
    known = (PRETRAIN, NATIVE, PREFLIGHT, *LAUNCHERS, "python tools/")
    others = [line for line in LINES if not line.startswith(known)]
    for line in others:
        words = shlex.split(line)
        if words[0] == "bash":
            assert (repository / words[1]).is_file(), line
        else:
            assert words[:2] == ["pip", "install"], line
            for extra in re.findall(r"\[(\w+)\]", line):
                assert f'"{extra}": [' in (repository / "setup.py").read_text(), line
            pins = (repository / "constraints.txt").read_text().splitlines()
            assert all(word in pins for word in words if "==" in word), line


def test_help_of_the_test_runner(repository):
    result = run(repository, "bash tests/run.sh --help")
    assert result.returncode == 0
    assert all(option in result.stdout for option in ("--slow", "--soak"))


def test_fields_exist():
    dotted = [word for word in readme.code_words(readme.everything()) if re.fullmatch(r"[a-z_]+(\.\w+)+", word)]
    named = [word for word in dotted if word.partition(".")[0] in SECTIONS and word != "run.sh"]
    assert len(named) > 20
    assert [word for word in named if word not in FIELDS] == []


def test_table_of_sections():
    rows = {key.strip("`"): value for key, value in readme.table("Configuration", "section").items()}
    assert list(rows) == list(SECTIONS)
    for name, cell in rows.items():
        fields = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell))
        assert fields and [field for field in fields if f"{name}.{field}" not in FIELDS] == [], name
        values = re.findall(r"`(\w+)`", "".join(re.findall(r"`\w+` \(([^)]*)\)", cell)))
        kinds = str([FIELDS[f"{name}.{field}"] for field in fields])
        assert [value for value in values if f"'{value}'" not in kinds] == [], name


def test_defaults_of_the_recipe():
    config = PretrainConfig()
    phases = [(phase.from_fraction, phase.passes) for phase in config.feedback.phases]
    assert phases == [(0.0, {1: 1.0}), (0.75, {2: 0.88, 3: 0.12})]
    weights = config.feedback.loss_weights
    assert (weights.first_pass, weights.extra_passes, weights.per_pass) == (1.0, 1.0, None)
    assert (config.feedback.prefix.probability, config.feedback.prefix.granularity) == (1.0, "row")
    assert (config.feedback.jitter.scale, config.feedback.input_scale) == (0.02, None)
    assert (config.feedback.fusion, config.model.input_norm, config.feedback.eval_passes) == ("gate", "rms", None)


def test_exit_codes():
    rows = readme.table("Exit codes", "code")
    classes = {cls.exit_code: cls.__name__ for cls in FBTError.__subclasses__() if cls.__module__ == errors.__name__}
    assert {int(code) for code in rows if code.isdigit()} == {0, 1, *classes}
    for code, name in classes.items():
        assert re.search(rf"^\| {code} \|.*\| `{name}` \|$", readme.text(), re.MULTILINE), name


def test_kinds_of_bad_lines():
    rows = readme.table("Data files", "kind")
    assert {kind for cell in rows for kind in re.findall(r"`(\w+)`", cell)} == set(BAD_LINES)


def test_regimes():
    rows = readme.table("Export and generation", "`--regime`")
    assert [cell.strip("`") for cell in rows] == list(REGIMES)


@pytest.mark.parametrize("path", readme.tree_paths())
def test_tree_exists(repository, path):
    assert (repository / path).exists()
    assert (repository / path).is_dir() == path.endswith("/")


def test_tree_has_every_folder(repository):
    listed = {path.rstrip("/") for path in readme.tree_paths()}
    folders = {f"megatron_fbt/{path.parent.name}" for path in repository.glob("megatron_fbt/*/__init__.py")}
    others = {f"tests/{path.name}" for path in (repository / "tests").iterdir() if any(path.glob("test_*.py"))}
    tools = {"tools", "benchmarks", "docs", "examples", "examples/configs"}
    assert folders | others | tools <= listed


def test_named_paths_exist(repository):
    top = {path.name for path in repository.iterdir()}
    words = " ".join(readme.code_words(readme.everything())).split()
    paths = [word for word in words if word.split("/")[0] in top - {"runs"} or word.endswith((".sh", ".md", ".txt"))]
    assert len(paths) >= 4
    assert [path for path in paths if not (repository / path).exists()] == []


@pytest.mark.parametrize("page", readme.pages())
def test_links(repository, page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme.pages()[page]) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (repository / page).parent / path if path else repository / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.+)$", readme.prose_safe(target.read_text()), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tested_versions(repository):
    pins = (repository / "constraints.txt").read_text().splitlines()
    rows = re.findall(r"^\| (3\.1\d) \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+) \|$", readme.text(), re.MULTILINE)
    assert [row[0] for row in rows] == ["3.11", "3.12"]
    for (python, megatron, torch, transformers), relation in zip(rows, ("<", ">=")):
        assert f'megatron-core=={megatron}; python_version {relation} "3.12"' in pins, python
        assert f"torch=={torch}" in pins and f"transformers=={transformers}" in pins
