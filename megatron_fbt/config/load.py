"""From YAML and the command line to a PretrainConfig, and back to YAML."""

import argparse
import dataclasses
import functools
import os
import re
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from megatron_fbt.config.checks import resolve_world_size, validate_config, validate_for_training
from megatron_fbt.config.keys import check_config_file, check_option_names, check_option_values, field_types
from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.rules import describe_type
from megatron_fbt.errors import ConfigError

DESCRIPTION = "Trains a Full-Bandwidth Transformer. Fields of a file are overridden by the command line."
EXAMPLE = """example:
  torchrun --nproc_per_node 4 -m megatron_fbt.pretrain --config examples/configs/tiny_cpu.yaml \\
      --parallel.tensor_model_parallel_size 2 --training.train_steps 100
  python -m megatron_fbt.pretrain --config examples/configs/tiny_cpu.yaml --parallel.world_size 64 --dry_run

exit codes: 0 done, 2 configuration, 3 data, 4 checkpoint, 5 bad numbers, 75 stopped by a signal and resumable
"""
FLAGS = ("config", "help", "print_config", "dry_run", "json", "feedback.schedule.help")


@dataclass(frozen=True)
class CommandOptions:
    """What the command line asks for beside the configuration."""

    dry_run: bool = False
    """Check everything and print the plan; start nothing."""
    json: bool = False
    """Print the plan of a dry run as JSON."""


def parse_command_line(argv: Sequence[str]) -> Tuple[PretrainConfig, CommandOptions]:
    """Read and check the configuration of a training run, without torch and without processes.

    --help and --print_config print to standard output and leave with SystemExit(0).

    Args:
        argv: arguments after the command's name.

    Raises:
        ConfigError: on anything unknown, of a wrong type, out of range or impossible in combination.
    """
    argv = list(argv)
    check_option_names(argv, FLAGS)
    check_option_values(argv)
    for path in _config_files(argv):
        check_config_file(path)
    parser = build_parser()
    config, parsed = _parse(parser, argv)
    if parsed.print_config:
        print(dump_yaml(config), end="")
        parser.exit(0)
    options = CommandOptions(dry_run=parsed.dry_run, json=parsed.json)
    if options.json and not options.dry_run:
        raise ConfigError("--json = true: only a dry run prints JSON; add --dry_run, or leave --json out")
    validate_config(config, resolve_world_size(config, os.environ, options.dry_run))
    if not options.dry_run:
        validate_for_training(config)
    return config, options


def load_yaml(path: str) -> PretrainConfig:
    """Read a configuration file; fields it does not name have their defaults.

    Names and types are checked; ranges and combinations are not (see checks.validate_config).

    Raises:
        ConfigError: naming the file, the key and a remedy.
    """
    check_config_file(str(path))
    return _parse(build_parser(), ["--config", str(path)])[0]


def dump_yaml(config: PretrainConfig) -> str:
    """Write a configuration with all its fields, so that load_yaml gives an equal one."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that holds a digit: `1e3` is text to PyYAML and a number to other YAML readers."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """Write a text."""
        style = '"' if any(character.isdigit() for character in text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


@functools.cache  # a run reads several configurations, and it takes longer to build than to use
def build_parser() -> ArgumentParser:
    """The command line: one option for each field, and the flags."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="megatron_fbt.pretrain",
        usage="%(prog)s --config FILE [--section.field VALUE ...] [--help | --print_config | --dry_run [--json]]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file; given several times, later ones win")
    parser.add_argument("--print_config", action="store_true", help="print the resulting YAML and exit")
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--json", action="store_true", help="print the plan of a dry run as JSON")
    parser.add_class_arguments(PretrainConfig)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the line breaks of the example."""


def _config_files(argv: List[str]) -> List[str]:
    """Values of --config, in order."""
    pairs = zip(argv, [*argv[1:], ""])
    found = [(arg.partition("=")[2] if "=" in arg else following) for arg, following in pairs if _is_config(arg)]
    return [path for path in found if path]


def _is_config(arg: str) -> bool:
    return arg == "--config" or arg.startswith("--config=")


def _parse(parser: ArgumentParser, argv: List[str]) -> Tuple[PretrainConfig, Any]:
    """Parse arguments whose names have been checked."""
    try:
        parsed = parser.parse_args(argv)
        sections = parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error))) from None
    except OverflowError as error:
        raise ConfigError(f"a number has too many digits ({error}); give one that a float can hold") from None
    names = [field.name for field in dataclasses.fields(PretrainConfig)]
    return PretrainConfig(**{name: getattr(sections, name) for name in names}), parsed


def _explain(text: str) -> str:
    """A parser's message as `field = value: what is wrong; remedy`."""
    match = re.match(r'Parser key "([^"]+)":\s*(.*)', text, re.DOTALL)
    if not match:
        return f"{' '.join(text.split())}; --help shows how each option is written"
    field, detail = match.groups()
    types = field_types()
    remedy = f"give {describe_type(types[field])}" if field in types else "--help shows how it is written"
    patterns = (
        r"Expected a .*?\. Got value: (.*)",
        r"Does not .*Given value: (.*)",
        r"Unable to load config\s+['\"](.*?)['\"]\s.*",
    )
    value = re.fullmatch("|".join(patterns), detail, re.DOTALL)
    if value:
        (given,) = (text for text in value.groups() if text is not None)
        return f"{field} = {' '.join(given.split()) or repr(given)}: wrong type or value; {remedy}"
    return f"{field}: {' '.join(detail.split())}; {remedy}"
