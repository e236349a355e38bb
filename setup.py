"""Compiles the kernels when the package is built; all other settings are in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("fastsiam", "kernels")
# Loaded by its path: the package cannot be imported in an isolated build.
spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


class BuildWithKernels(build_py):
    """Builds the kernels into the build folder, or next to the sources in an editable install."""

    def run(self):  # noqa: D102
        super().run()
        kernels.build(KERNELS if self.editable_mode else Path(self.build_lib) / KERNELS)


class OfThisPlatform(Distribution):
    """Distribution marked as platform-specific, though its libraries are not extension modules."""

    def has_ext_modules(self):  # noqa: D102
        return True


class WheelOfAnyPython(bdist_wheel):
    """Tags the wheel with the platform alone: the libraries do not use Python's C API."""

    def get_tag(self):  # noqa: D102
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base, *args, **kwargs):
        """Add libjpeg-turbo's licence to the wheel's licences if the wheel contains the library."""
        super().write_wheelfile(wheelfile_base, *args, **kwargs)
        licence, info = Path(self.bdist_dir) / KERNELS / kernels.JPEG_LICENCE, Path(wheelfile_base)
        if licence.exists():
            licence.rename(info / "licenses" / licence.name)
            metadata, licence_line = info / "METADATA", "License-File: LICENSE\n"
            text = metadata.read_text(encoding="utf-8")
            text = text.replace(licence_line, f"{licence_line}License-File: {licence.name}\n", 1)
            metadata.write_text(text, encoding="utf-8")


setup(
    distclass=OfThisPlatform,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    setup_requires=[] if kernels.compiler() else ["ziglang"],  # brings a compiler
)
