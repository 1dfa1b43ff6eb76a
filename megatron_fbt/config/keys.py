"""Names of the configuration's fields, and the check that a file or a command line uses no others."""

import dataclasses
import difflib
import os
from typing import Any, Dict, Iterable, List, Union, get_args, get_origin, get_type_hints

import yaml

from megatron_fbt.config.pretrain import PretrainConfig
from megatron_fbt.config.rules import raise_problems, show
from megatron_fbt.errors import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict[Any, Any]:
        """Build a mapping after looking for repeated keys."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = [key for index, key in enumerate(keys) if key in keys[:index]]
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"{repeated[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def field_types(cls: type = PretrainConfig, prefix: str = "") -> Dict[str, Any]:
    """{dotted name: type} of all sections and fields below a dataclass, in order."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        found[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            found.update(field_types(hint, f"{prefix}{name}."))
    return found


def suggest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the known one that looks most like it."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        last = {candidate.rpartition(".")[2]: candidate for candidate in known}
        close = [last[match] for match in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.8)]
    return f"did you mean {close[0]}?" if close else "--help lists all fields"


def check_config_file(path: str) -> None:
    """Check that a YAML file can be read and holds only fields that exist.

    Raises:
        ConfigError: naming the file, and each key that is wrong with a remedy.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"--config {path}: no such file; give the path of a YAML file")
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, Loader=UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        text = " ".join(str(error).replace("<unicode string>", path).split())
        raise ConfigError(f"{path}: cannot be read as YAML: {text}; correct the file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no sections; write a mapping such as `training: {{train_steps: 100}}`")
    raise_problems([f"{path}: {problem}" for problem in _tree_problems(tree, PretrainConfig, "")])


def check_option_names(argv: List[str], flags: Iterable[str]) -> None:
    """Check that every --name on a command line is a flag or a field.

    Raises:
        ConfigError: naming each unknown option with a remedy.
    """
    known = {f"--{name}" for name in (*flags, *field_types())}
    given = [arg.partition("=")[0].removesuffix("+") for arg in argv if arg.startswith("--")]
    raise_problems([f"{name}: unknown option; {suggest(name, known)}" for name in given if name not in known])


def check_option_values(argv: List[str]) -> None:
    """Check what the parser would complete or round without a word: lists of sections on a command line.

    Raises:
        ConfigError: naming each key that is unknown, missing or of a wrong type.
    """
    types, problems = field_types(), []
    for arg, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = arg.removeprefix("--").partition("=")
        hint = types.get(name) if arg.startswith("--") else None
        if hint is None or "List" not in str(hint):
            continue
        try:
            tree = yaml.load(value if equals else following, Loader=UniqueKeyLoader)
        except yaml.YAMLError:
            continue  # the parser says what is wrong
        problems += _tree_problems(tree, hint, name) if isinstance(tree, list) else []
    raise_problems(problems)


def _tree_problems(tree: Any, hint: Any, prefix: str) -> List[str]:
    """Keys of a parsed file that are no fields, and sections that are no mappings; values are checked elsewhere."""
    if get_origin(hint) is Union and isinstance(tree, list):
        hint = next((choice for choice in get_args(hint) if get_origin(choice) is list), hint)
    if get_origin(hint) is list and isinstance(tree, list):
        item = get_args(hint)[0]
        return [p for index, entry in enumerate(tree) for p in _tree_problems(entry, item, f"{prefix}[{index}]")]
    if get_origin(hint) is dict and get_args(hint)[0] is int and isinstance(tree, dict):
        wrong = [key for key in tree if isinstance(key, bool) or not str(key).isdecimal()]
        return [f"{prefix}: {show(key)} is not a whole number; give whole numbers before the colons" for key in wrong]
    if not dataclasses.is_dataclass(hint):
        return []
    if not isinstance(tree, dict):
        example = next(iter(get_type_hints(hint)))
        return [f"{prefix} = {show(tree)}: not a section; give it fields such as {example}, or remove it"]
    hints, dot = get_type_hints(hint), prefix and prefix + "."
    problems = []
    for key, value in tree.items():
        if key in hints:
            problems += _tree_problems(value, hints[key], f"{dot}{key}")
        else:
            known = field_types() if not prefix.endswith("]") else [f"{dot}{name}" for name in hints]
            problems.append(f"{dot}{key}: unknown key; {suggest(f'{dot}{key}', known)}")
    if prefix.endswith("]") and not problems:
        needed = [f.name for f in dataclasses.fields(hint) if f.default is f.default_factory is dataclasses.MISSING]
        missing = [name for name in needed if name not in tree]
        if missing:
            return [f"{prefix} = {show(tree)}: lacks {' and '.join(missing)}; give {' and '.join(needed)}"]
    return problems
