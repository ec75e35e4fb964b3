from setuptools import Extension, setup

# Not imported, but loaded with ctypes: no Python headers are needed. Without a compiler NumPy and memmove do
# their work.
setup(
    ext_modules=[
        Extension(
            "reft.protect._packets",
            ["reft/protect/packets.cpp"],
            depends=["setup.py"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "reft.store._stream",
            ["reft/store/stream.cpp"],
            depends=["setup.py"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ]
)
