"""From a job's YAML file to a JobConfig, checked together with the run's configuration."""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import re
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Union, get_type_hints

import yaml

from megatron_fbt.config.keys import UniqueKeyLoader, field_types, suggest
from megatron_fbt.config.rules import describe_type, raise_problems, show
from megatron_fbt.errors import ConfigError
from megatron_fbt.slurm.job import JobConfig


def load_job(path: Union[str, Path]) -> JobConfig:
    """Read and check a job file.

    Raises:
        ConfigError: naming the file, and each wrong key or value with a remedy.
    """
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_JobLoader)
    except FileNotFoundError:
        raise ConfigError(f"--job {path}: no such file; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}; correct the file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no fields; write a mapping such as `nodes: 2`")
    problems: List[str] = []
    job = _build(JobConfig, tree, "", problems)
    raise_problems([f"{path}: {problem}" for problem in problems or job.problems()])
    return job


class _JobLoader(UniqueKeyLoader):
    """Leaves `24:00:00` a text, which YAML 1.1 takes for a number in base 60."""


_JobLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:int"]
    for first, resolvers in UniqueKeyLoader.yaml_implicit_resolvers.items()
}
_JobLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^(?:0|[-+]?[1-9][0-9]*)$"), list("-+0123456789"))


def _build(cls: type, tree: Dict[str, Any], prefix: str, problems: List[str]) -> Any:
    """A section from a mapping; keys that are no fields become problems."""
    hints = get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            problems.append(f"{prefix}{key}: unknown key; {suggest(f'{prefix}{key}', field_types(JobConfig))}")
        elif dataclasses.is_dataclass(hints[key]):
            if isinstance(value, dict):
                values[key] = _build(hints[key], value, f"{prefix}{key}.", problems)
            else:
                problems.append(f"{prefix}{key} = {show(value)}: not a section; give it fields, or remove it")
        else:
            values[key] = str(value) if key in ("time", "array") and isinstance(value, int) else value
    return cls(**values)


def run_dir_of(job: JobConfig) -> str:
    """The run folder of a training job, after its configuration was checked for the job's number of ranks.

    Relative paths, also those within the configuration, are meant from the folder in which the job runs.

    Raises:
        ConfigError: the folder or the configuration is missing, the configuration is wrong, or does not fit the job.
    """
    from megatron_fbt.config.load import load_yaml, parse_command_line

    with contextlib.chdir(work_folder(job)):
        if not os.path.isfile(job.config):
            where = f" in workdir = {job.workdir!r}" if job.workdir else ""
            remedy = "give the path of a YAML file, from the folder in which the job runs"
            raise ConfigError(f"job.config = {job.config!r}: no such file{where}; {remedy}")
        size = ["--parallel.world_size", str(job.world_size)]
        config, _ = parse_command_line(["--config", job.config, *job.overrides, *size, "--dry_run"])
        for path in _config_files(job):
            named = load_yaml(path).parallel.world_size
            if named not in (None, job.world_size):
                raise ConfigError(
                    f"{path}: parallel.world_size = {named}: the job starts {job.world_size} ranks (nodes x "
                    "devices_per_node); remove it, or change nodes or devices_per_node"
                )
    return config.run.dir


def _config_files(job: JobConfig) -> List[str]:
    words = ["--config", str(job.config), *job.overrides]
    after = [value for name, value in itertools.pairwise(words) if name == "--config"]
    return after + [word.partition("=")[2] for word in words if word.startswith("--config=")]


def work_folder(job: JobConfig) -> Path:
    """The folder in which the job runs.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(job.workdir or ".")
    if not folder.is_dir():
        raise ConfigError(f"job.workdir = {job.workdir!r}: no such folder; make it, or name another one")
    return folder


def describe_fields() -> str:
    """The fields of a job file with type, default and meaning, for --help."""
    return "\n".join(["fields of a job file (type, default):", *_field_lines(JobConfig, "")])


def _field_lines(cls: type, prefix: str) -> List[str]:
    body = ast.parse(inspect.getsource(cls)).body[0].body
    docs = {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    section, lines, indent = cls(), [], " " * 6
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            lines += _field_lines(hint, f"{name}.")
        else:
            lines.append(f"  {prefix}{name} ({describe_type(hint)}, {show(getattr(section, name))})")
            lines.append(textwrap.fill(docs[name], 110, initial_indent=indent, subsequent_indent=indent))
    return lines
