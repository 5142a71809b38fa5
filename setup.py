"""What pyproject.toml cannot say: two optional C modules, one of them built against the libfuse that is installed."""

import shlex
import subprocess

from setuptools import Extension, setup


def _libfuse() -> list[str]:
    """Compiler flags. Without pkg-config or libfuse the build of the module fails, and ckptfs does without it."""
    try:
        return shlex.split(subprocess.check_output(["pkg-config", "--cflags", "fuse3"], text=True))
    except (OSError, subprocess.CalledProcessError):
        return []


setup(
    ext_modules=[
        Extension(
            "ckptfs_mount._passthrough",
            ["mount/_passthrough.c"],
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", *_libfuse()],
            libraries=["fuse3"],
            optional=True,
        ),
        Extension(
            "ckptfs.encoding._elements",
            ["ckptfs/encoding/_elements.c"],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            optional=True,
        ),
    ]
)
