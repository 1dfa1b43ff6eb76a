"""Optional GPU libraries: absent, there, or only called like them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, os, pkgutil, sys
import datasets, deepspeed, numpy, torch, transformers
def show():
    import megatron_fbt
    for module in pkgutil.walk_packages(megatron_fbt.__path__, "megatron_fbt."):
        importlib.import_module(module.name)
    from megatron_fbt.optional import apex_problem, transformer_engine_problem, weight_gradient_kernel_problem
    return [apex_problem(), weight_gradient_kernel_problem(), transformer_engine_problem()]
for folder in sys.argv[1:]:  # each in a process of its own that has the slow libraries already
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        print(repr(show()), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed with {folder}")
"""
NVIDIA_APEX = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "class FusedAdam: pass\nclass FusedSGD: pass\n",
    "apex/multi_tensor_apply/__init__.py": "multi_tensor_applier = None\n",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNormAffineFunction: pass\n",
    "apex/contrib/__init__.py": "",
    "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = multi_tensor_adam = None\n",
}
KERNEL = {"fused_weight_gradient_mlp_cuda.py": ""}
TRANSFORMER_ENGINE = {
    "transformer_engine/__init__.py": '''
import importlib.abc, importlib.machinery, sys, types

class Kind(type):
    """Has every attribute."""
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Module(name)

class Module(types.ModuleType):
    """Has a class of every upper-case name, to inherit from, and a module of every other one."""
    __path__ = []
    __version__ = "2.9.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name.lstrip("_")[:1].isupper()
        value = Kind(name, (), {"__module__": self.__name__}) if is_class else Module(name)
        setattr(self, name, value)
        return value

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.modules[__name__].__class__ = Module
'''
}
FOREIGN_APEX = {"apex/__init__.py": "raise RuntimeError('pyramid')\n"}
IMPORTABLE_FOREIGN_APEX = {"apex/__init__.py": "models = None\n"}
EMPTY_TE = {"transformer_engine/__init__.py": "raise RuntimeError('Found empty `transformer-engine` meta package')\n"}
NOT_NVIDIAS = "another package called apex, or a broken installation"
CASES = {
    "none": ({}, ["not installed", "not installed", "not installed"]),
    "apex": (NVIDIA_APEX, [None, "built without --cuda_ext", "not installed"]),
    "all": ({**NVIDIA_APEX, **KERNEL, **TRANSFORMER_ENGINE}, [None, None, None]),
    "broken": ({**FOREIGN_APEX, **KERNEL, **EMPTY_TE}, [NOT_NVIDIAS, NOT_NVIDIAS, "its installation is broken"]),
    "foreign": (IMPORTABLE_FOREIGN_APEX, [NOT_NVIDIAS, NOT_NVIDIAS, "not installed"]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case says after it has imported every module; stand-ins are there to be found, not to be used."""
    root = tmp_path_factory.mktemp("libraries")
    for case, (files, _) in CASES.items():
        (root / case).mkdir()
        for name, text in files.items():
            path = root / case / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *(str(root / case) for case in CASES)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(zip(CASES, [line for line in result.stdout.splitlines() if line.startswith("[")], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_module_imports_whatever_is_installed(found, case):
    assert found[case] == repr(CASES[case][1])
