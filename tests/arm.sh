#!/bin/bash
# Compiles the kernels for 64-bit Arm and tests them there, under qemu's emulation of a process.
#
# Usage, as root on Debian or Ubuntu: tests/arm.sh FOLDER [PYTEST-ARGUMENT ...]
#
# FOLDER keeps Debian's libraries and Python for Arm, and the packages that the tests import: 1.5 GB.
# Nothing is installed on this machine. $PYTHON has fastsiam's packages and makes the views to which
# those of Arm are compared bit by bit. $UV is the program uv.
set -euo pipefail

PYTHON=${PYTHON:-python3}
mkdir -p "$1" && arm=$(realpath "$1") && shift
cd "$(dirname "$0")/.."
root=$arm/root site=$arm/site views=$arm/views.npz
# The last torch for Arm on PyPI without CUDA, and the torchvision that belongs to it.
torch=(torch==2.10.0 torchvision==0.25.0)
packages=(hypothesis numpy pillow psutil pyarrow pytest pyyaml rich safetensors scipy tqdm typer)

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static debootstrap; do
    command -v "$tool" >/dev/null || {
        echo "$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user-static debootstrap" >&2
        exit 1
    }
done

if [ ! -e "$root/complete" ]; then
    rm -rf "$root"
    # Debian 12, whatever this machine has: its Python is one that fastsiam supports.
    debootstrap --foreign --arch=arm64 --variant=minbase \
        --include=python3,libc6-dev,libjpeg62-turbo-dev bookworm "$root" >/dev/null
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar --extract --directory "$root" --keep-directory-symlink
    done
    # qemu looks for each path in here first: temporary files belong to the machine.
    rm -rf "$root"/{tmp,home,root,dev,proc,sys,run,var}
    touch "$root/complete"
fi
if [ ! -e "$site/complete" ]; then
    rm -rf "$site"
    grep --invert-match --extended-regexp '^(torch|torchvision|triton)==' requirements.lock >"$arm/lock"
    "${UV:-uv}" pip install --quiet --system-certs --target "$site" --only-binary :all: \
        --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
        --constraint "$arm/lock" "${torch[@]}" "${packages[@]}"
    touch "$site/complete"
fi

# Tests start programs: Python by this script, and the compiler, which is this machine's own.
cat >"$arm/python" <<END
#!/bin/sh
export PYTHONHOME='$root/usr' PYTHONPATH='$PWD:$site' PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec qemu-aarch64-static -0 '$arm/python' -L '$root' '$root/usr/bin/python3.11' "\$@"
END
chmod +x "$arm/python"
export FASTSIAM_KERNELS=$arm/kernels CXX="aarch64-linux-gnu-g++ --sysroot=$root"
"$PYTHON" - <<END
import platform
platform.machine = lambda: "aarch64"  # so that the build compiles for Arm
from fastsiam.kernels import build
build.build(build.own_folder())
END

env --unset=FASTSIAM_KERNELS --unset=CXX "$PYTHON" -m tests.arm_views save "$views"
"$arm/python" -m tests.arm_views compare "$views"
[ $# -gt 0 ] || set -- tests/pipelines/test_engine.py tests/kernels
# Left out, because Pillow's packages for Arm fuse the multiplication and addition of a blend, so its
# pixels differ from those on x86; ldd cannot read Arm's libraries; qemu does not limit memory; a
# folder in $FASTSIAM_KERNELS is taken for sanitized kernels.
left_out=(
    tests/kernels/test_colours.py::test_blends_equal_pil
    tests/kernels/test_library.py::test_libraries_are_self_contained_and_hide_symbols
    tests/kernels/test_memory.py::test_work_succeeds_after_memory_error
    tests/kernels/test_memory.py::test_sanitizer_detects_one_byte_overflow
)
exec "$arm/python" -m pytest -p no:cacheprovider -m "not slow and not alone" \
    "${left_out[@]/#/--deselect=}" "$@"
