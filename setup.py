"""Builds the one compiled part of sennit; everything else about the project stands in pyproject.toml.

It is optional: where there is no C compiler the install still succeeds, and the interpreter in Python serves in its place. It is a plain shared library
that includes no Python header, so one build serves all Python versions.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "sennit.collective.runtime._shm_core",
            ["src/sennit/collective/runtime/shm_core.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
