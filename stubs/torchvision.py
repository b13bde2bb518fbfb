"""Stands in for torchvision in the CPU server: vLLM imports the image code of Qwen3.5 for text-only
models too, and no torchvision imports beside the CPU build of torch. Nothing in it is ever called.
run.sh puts this folder on the path of a CPU server with such a model, and on no other.
"""

import sys
from unittest.mock import MagicMock

__path__ = []  # makes it a package
__version__ = "0.0"
for name in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    sys.modules[f"torchvision.{name}"] = MagicMock()
