"""Repeat the first steps of small runs and compare them bit for bit.

    python -m tests.repeat_runs --data cifar10-jpeg.zip

Each process repeats one method's run. Every second process runs alongside two busy processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch

from fastsiam.config import TrainConfig
from fastsiam.config.methods import METHOD_CONFIGS
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import Settings, merge
from fastsiam.distributed import Place
from fastsiam.methods import build_method
from fastsiam.pipelines import build_loader
from fastsiam.run.checkpoint import weights_hash
from fastsiam.train.step import TrainingStep

STEPS, CPU, DTYPE = 12, Place(0, 1, torch.device("cpu")), torch.bfloat16
SETTINGS = {
    "width": 16, "batch": 16, "compile": "off", "pipeline": "memory", "precision": "bf16",
    "device": "cpu", "workers": 0, "bn_images": 0,
}  # fmt: skip
BUSY = "block = bytearray(1 << 24)\nwhile True: block[:] = bytes(block)"


def run_once(config: TrainConfig) -> dict[str, str]:
    """Take the first steps of a new run; return hashes in the order of computation."""
    size = config.optim.batch
    with closing(build_loader(config.data, config.augment, batch=size, dtype=DTYPE)) as loader:
        torch.manual_seed(config.numerics.seed)
        method = build_method(config.model, images=loader.images)
        step = TrainingStep(config, method, CPU, steps_per_epoch=loader.steps)
        step.prepare()
        hashes = {"initial weights": weights_hash(method.state_dict())}
        for at, batch in enumerate(islice(loader.epoch(0), STEPS)):
            views = {str(number): view for number, view in enumerate(batch.views)}
            hashes[f"views of step {at}"] = weights_hash(views)
            hashes[f"loss of step {at}"] = weights_hash({"loss": step(batch, at=at)[0]})
        return hashes | {"weights": weights_hash(method.state_dict())}


def repeat(config: TrainConfig, times: int) -> list[dict[str, str]]:
    """Repeat a run on two threads; return the hashes of each repetition."""
    torch.set_num_threads(2)
    return [run_once(config) for _ in range(times)]


def results(method: str, data: str, *, processes: int, times: int) -> list[dict[str, str]]:
    """Repeat a method's run in several processes, one after another."""
    recipe = f"{method}_cifar10"
    source = Settings(recipe=recipe if recipe in RECIPES else "cifar10", flags={"method": method})
    config = TrainConfig.from_flags({**merge(source).flags, **SETTINGS, "data": data})
    runs = []
    for process in range(processes):
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * (process % 2))]
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                runs += pool.submit(repeat, config, times).result()
        finally:
            for other in busy:
                other.kill()
    return runs


def main() -> int:
    """Print a line for each method; return 1 if a repetition differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="zip of train/CLASS/*.jpg")
    parser.add_argument("--methods", nargs="*", default=METHOD_CONFIGS)
    parser.add_argument("--processes", type=int, default=20, help="processes per method")
    parser.add_argument("--times", type=int, default=25, help="repetitions per process")
    options = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # spinning next to busy processes takes minutes
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(options.data) as archive:
            archive.extractall(folder, archive.namelist()[:: len(archive.namelist()) // 300])
        for method in options.methods:
            runs = results(method, folder, processes=options.processes, times=options.times)
            differ = [next(k for k in x if x[k] != runs[0][k]) for x in runs if x != runs[0]]
            equal = len(runs) - len(differ)
            print(f"{method}: {equal} of {len(runs)} repetitions are equal {differ}", flush=True)
            code |= bool(differ)
    return code


if __name__ == "__main__":
    sys.exit(main())
