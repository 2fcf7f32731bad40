"""Packaging of megatron_spec. `pip install -e .[dev]` for development, `.[te]` on GPU machines."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

if not (3, 10) <= sys.version_info[:2] <= (3, 12):  # pip names python_requires only after it has resolved the rest
    sys.exit(f"megatron-spec needs Python 3.10 to 3.12, found {sys.version.split()[0]}")

DEV = [
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    "mypy>=1.11",
    "import-linter>=2.1",
    "pre-commit>=3.5",
]

DATA = ["datasets>=2.19", "pyarrow>=14", "openai>=1.40", "rich>=13"]

setup(
    name="megatron-spec",
    version="0.1.0",
    description="Draft models for speculative decoding on megatron-core: convert, finetune, fp8 QAT, export",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["megatron_spec", "megatron_spec.*"]),
    package_data={"megatron_spec": ["py.typed"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "psutil",  # dist_checkpointing needs it and does not declare it: without it a save hangs
        "transformers>=4.53",
        "safetensors>=0.4.5",
        "numpy",
        "tqdm",
        "jinja2",
        "packaging",
        "pyyaml",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.4"],
        "demo": ["gguf>=0.17", "matplotlib>=3.8"],
        "tracking": ["tensorboard", "wandb"],
        "serving": ["openai>=1.40"],
        "data": DATA,
        "dev": [*DEV, *DATA, "gguf>=0.17", "matplotlib>=3.8", "tensorboard"],
    },
)
