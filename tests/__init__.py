"""Tests; what is set here holds for every process that they start."""

import os

# Inductor would start compiler processes in each test process, and each of them imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
