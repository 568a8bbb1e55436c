"""Package metadata of odcengine (build system and tool settings are in pyproject.toml)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "odcengine/_version.py").read_text())
assert VERSION is not None, "odcengine/_version.py states no __version__"

DEEPSPEED = ["deepspeed>=0.19.8,<0.20"]
HF = ["transformers>=4.56", "datasets>=3", "peft>=0.15"]
MONITOR = ["rich>=13", "matplotlib>=3.8", "tensorboard>=2.16"]
EXTRAS = {
    "cuda12": ["triton>=3.2", "nvshmem4py-cu12>=0.1.2"],
    "cuda13": ["triton>=3.2", "nvshmem4py-cu13>=0.1.2"],
    "mpi": ["mpi4py>=4"],
    "deepspeed": DEEPSPEED,
    "hf": HF,
    "monitor": MONITOR,
    "dev": [
        *HF,
        *MONITOR,
        *(f"{needed}; platform_system == 'Linux'" for needed in DEEPSPEED),
        "accelerate>=1.10",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "hypothesis>=6",
        "psutil>=6",
        "mpi4py>=4.1; platform_system == 'Linux'",  # has wheels, which need no MPI to install
        "ruff==0.17.6",
        "mypy==2.4.1",
        "triton>=3.2; platform_system == 'Linux' and platform_machine == 'x86_64'",
        "types-PyYAML",
        "build>=1.2",
    ],
}

setup(
    name="odcengine",
    version=VERSION.group(1),
    description="LLM post-training with on-demand communication instead of per-layer collectives",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["odcengine", "odcengine.*"]),
        *find_packages("launcher"),
        *find_packages("tools"),
    ],
    package_dir={"odc_launcher": "launcher/odc_launcher", "odc_tools": "tools/odc_tools"},
    package_data={"odcengine": ["py.typed"], "odc_launcher": ["py.typed"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "pydantic>=2.7",
        "pyyaml>=6",
        "sentencepiece>=0.2",
        "safetensors>=0.4.5",
        "pyarrow>=16",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "odc-launch = odc_launcher.cli:main",
            "odc = odc_tools.cli:main",
        ]
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
