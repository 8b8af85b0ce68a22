"""What tests share is beside their folders."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
