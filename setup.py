"""Compiles the kernels when the package is built; all else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("fastsiam", "kernels")
# By its path: the package itself needs what is not there while it is built.
spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


class BuildWithKernels(build_py):
    """Puts the libraries where the package is built, or beside its sources if it is editable."""

    def run(self):
        super().run()
        kernels.build(KERNELS if self.editable_mode else Path(self.build_lib) / KERNELS)


class WheelOfThisPlatform(bdist_wheel):
    """Names the wheel by the platform alone: the libraries know nothing of Python."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfThisPlatform},
    setup_requires=[] if kernels.compiler() else ["ziglang"],  # brings a compiler
)
