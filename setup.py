"""Compiles the kernels when the package is built; all else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("fastsiam", "kernels")
# By its path: the package itself needs what is not there while it is built.
spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


class BuildWithKernels(build_py):
    """Puts the libraries where the package is built, or beside its sources if it is editable."""

    def run(self):  # noqa: D102
        super().run()
        kernels.build(KERNELS if self.editable_mode else Path(self.build_lib) / KERNELS)


class OfThisPlatform(Distribution):
    """Says that there is something compiled, although it is no module of Python's."""

    def has_ext_modules(self):  # noqa: D102
        return True


class WheelOfAnyPython(bdist_wheel):
    """Names the wheel by the platform alone: the libraries know nothing of Python."""

    def get_tag(self):  # noqa: D102
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base, *args, **kwargs):
        """Add the licence of the libjpeg-turbo inside, if it is inside, to the wheel's licences."""
        super().write_wheelfile(wheelfile_base, *args, **kwargs)
        licence, info = Path(self.bdist_dir) / KERNELS / kernels.JPEG_LICENCE, Path(wheelfile_base)
        if licence.exists():
            licence.rename(info / "licenses" / licence.name)
            metadata, own = info / "METADATA", "License-File: LICENSE\n"
            text = metadata.read_text(encoding="utf-8")
            text = text.replace(own, f"{own}License-File: {licence.name}\n", 1)
            metadata.write_text(text, encoding="utf-8")


setup(
    distclass=OfThisPlatform,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    setup_requires=[] if kernels.compiler() else ["ziglang"],  # brings a compiler
)
