"""What pyproject.toml cannot say: the compiled parts, and a wheel of them that serves every
Python."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class Libraries(build_ext):
    """Libraries that are loaded with ctypes: their names carry no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for extension in self.extensions:  # one with a version in its name would be found first
            for old in Path().glob(f"{extension.name.replace('.', '/')}.*.so"):
                old.unlink()


class Wheel(bdist_wheel):
    """For any Python 3: of this platform, or of any where nothing could be compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        compiled = any(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if compiled else "any"


# Not imported, but loaded with ctypes: no Python headers are needed. Without a compiler NumPy and
# memmove do their work.
setup(
    cmdclass={"build_ext": Libraries, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "reft.protect._packets",
            ["reft/protect/packets.cpp"],
            depends=["setup.py"],
            extra_compile_args=["-O3", "-g0"],
            optional=True,
        ),
        Extension(
            "reft.memory._stream",
            ["reft/memory/stream.cpp"],
            depends=["setup.py"],
            extra_compile_args=["-O3", "-g0"],
            optional=True,
        ),
    ],
)
