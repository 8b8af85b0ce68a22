"""Pipelines of diffusers, built here from configurations: nothing is fetched."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
