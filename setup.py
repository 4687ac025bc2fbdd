"""Builds the compiled parts of sennit; everything else about the project stands in pyproject.toml.

All are optional: where there is no C compiler the install still succeeds, and Python serves in their place. The cores
are plain shared libraries that include no Python header; the short way into one of them uses the limited interface of
Python 3.11: one build of each serves all versions.
"""

from setuptools import Extension, setup

FOLDER = "src/sennit/collective/runtime"

setup(
    ext_modules=[
        Extension(
            "sennit.collective.runtime._shm_core",
            [f"{FOLDER}/shm_core.c"],
            depends=[
                f"{FOLDER}/shm_{part}.h"
                for part in ("copy", "messages", "pages", "pull", "records", "reduce", "strips", "wait")
            ],
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "sennit.collective.runtime._shm_call",
            [f"{FOLDER}/shm_call.c"],
            depends=[f"{FOLDER}/shm_{part}.h" for part in ("arrays", "known", "options", "tensors", "turn")],
            extra_compile_args=["-O2", "-std=gnu11"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "sennit.reshard._pull_core",
            ["src/sennit/reshard/pull_core.c"],
            extra_compile_args=["-O3", "-std=gnu11"],
            optional=True,
            py_limited_api=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
