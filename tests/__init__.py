"""Tests of fastsiam. Every process that they start inherits the environment set here."""

import os

# By default, Inductor starts compiler processes in each test process, and each imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
