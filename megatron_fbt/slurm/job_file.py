"""From a job's YAML file to a JobConfig, checked together with the run's configuration."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Dict, List, Union, get_type_hints

import yaml

from megatron_fbt.config.keys import UniqueKeyLoader, suggest
from megatron_fbt.config.rules import raise_problems, show
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
            problems.append(f"{prefix}{key}: unknown key; {suggest(str(key), hints)}")
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

    Raises:
        ConfigError: the configuration is wrong, or does not fit the job.
    """
    from megatron_fbt.config.load import parse_command_line

    size = ["--parallel.world_size", str(job.world_size)]
    config, _ = parse_command_line(["--config", job.config, *job.overrides, *size, "--dry_run"])
    return config.run.dir
