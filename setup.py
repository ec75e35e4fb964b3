"""What pyproject.toml cannot say: the compiled parts, and a wheel of them that serves every
Python."""

import os
import re
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


def describe() -> str:
    """The README for an index of packages, where relative links lead nowhere: they become absolute
    if ``REFT_REPOSITORY_URL`` says where the repository is, else plain text."""
    text = Path("README.md").read_text()
    text = re.sub(r"^!\[.*\)\n", "", text, flags=re.MULTILINE)
    url = os.environ.get("REFT_REPOSITORY_URL")
    link = rf"[\1]({url}/blob/main/\2)" if url else r"\1"
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", link, text)


# Not imported, but loaded with ctypes: no Python headers are needed. Without a compiler NumPy and
# memmove do their work.
setup(
    long_description=describe(),
    long_description_content_type="text/markdown",
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
