"""setup.py, constraints.txt and the installed packages say the same."""

import ast
import re
import sys
from importlib import metadata

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROVIDED_BY = {"yaml": "pyyaml", "google": "protobuf", "megatron": "megatron-core"}
"""Packages whose import has another name."""


def pins(repository, python):
    """{name: version} of constraints.txt for one version of Python."""
    lines = [line.partition("#")[0].strip() for line in (repository / "constraints.txt").read_text().splitlines()]
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    found = {}
    for requirement in map(Requirement, filter(None, lines)):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and requirement.name not in found
            found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def setup_requirements(repository):
    """Requirements of the package and of its extra `dev`."""
    (call,) = [
        node.value
        for node in ast.parse((repository / "setup.py").read_text()).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(given["extras_require"])
    return [Requirement(text) for text in ast.literal_eval(given["install_requires"]) + extras["dev"]]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_pins_lie_in_the_ranges(repository, python):
    pinned = pins(repository, python)
    for requirement in setup_requirements(repository):
        name = canonicalize_name(requirement.name)
        assert name in pinned, name
        assert requirement.specifier.contains(pinned[name]), requirement


def test_pins_satisfy_each_other(repository):
    """What `pip check` finds, of the pinned versions instead of the installed ones."""
    pinned = pins(repository, f"{sys.version_info.major}.{sys.version_info.minor}")
    problems = []
    for name, version in pinned.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(installed.version).public != version.public:
            continue
        for requirement in map(Requirement, installed.requires or []):
            wanted = canonicalize_name(requirement.name)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if wanted in pinned and not requirement.specifier.contains(pinned[wanted], prereleases=True):
                problems.append(f"{name} {version} needs {requirement}, but {wanted} {pinned[wanted]} is pinned")
    assert problems == []


def test_imports_are_required(repository):
    required = {canonicalize_name(requirement.name) for requirement in setup_requirements(repository)}
    optional = {"transformer-engine", "megatron-fbt"}
    for path in sorted([*(repository / "megatron_fbt").glob("**/*.py"), *(repository / "tools").glob("*.py")]):
        for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            known = canonicalize_name(PROVIDED_BY.get(name, name))
            assert known in required | optional or name in sys.stdlib_module_names, f"{path.name}: {name}"
