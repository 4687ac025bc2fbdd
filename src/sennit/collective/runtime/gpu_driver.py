"""CUDA from Python by its C interfaces alone: NVRTC compiles a kernel, the driver loads and launches it.

Both are stable C libraries, reached with ctypes: no torch, no compiler on the machine, no private interface of a
framework. NVRTC comes with CUDA or with torch's wheels; `load_nvrtc` looks in both. The kernel is launched
*cooperatively*: the driver then starts all its thread blocks at once or refuses, which a kernel whose blocks wait for
each other needs. `Kernel.resident_blocks` asks how many there may be.

Everything is done in the context that is current for the calling thread: torch has made one as soon as it has touched
the device.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sennit.errors import RunError

__all__ = ["Kernel", "Launch", "compile_kernel", "load_driver", "load_nvrtc"]

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel. `threads` is the size of its thread blocks, for which it was compiled."""

    driver: ctypes.CDLL
    function: ctypes.c_void_p
    threads: int
    multiprocessors: int

    def resident_blocks(self) -> int:
        """How many of its thread blocks this device can hold at once."""
        each = ctypes.c_int()
        query = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        _check(self.driver, query(ctypes.byref(each), self.function, self.threads, ctypes.c_size_t(0)), "the occupancy")
        return each.value * self.multiprocessors

    def prepare(self, blocks: int, argument: ctypes.Structure) -> Launch:
        """A launch with one argument, a structure, that may be started often. What it holds may be changed between."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        return Launch(self, blocks, argument, pointers)


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Kernel
    blocks: int
    argument: ctypes.Structure  # kept alive: `pointers` leads to it
    pointers: ctypes.Array[ctypes.c_void_p]

    def start(self, stream: int) -> None:
        """On this stream; all blocks at once."""
        kernel = self.kernel
        code = kernel.driver.cuLaunchCooperativeKernel(
            kernel.function, self.blocks, 1, 1, kernel.threads, 1, 1, 0, ctypes.c_void_p(stream), self.pointers
        )
        if code:
            _check(kernel.driver, code, f"a launch of {self.blocks} blocks of {kernel.threads} threads")


def compile_kernel(source: str, name: str, defines: Mapping[str, int | str], threads: int) -> Kernel:
    """Compile for the current device and load."""
    driver = load_driver()
    device = ctypes.c_int()
    _check(driver, driver.cuCtxGetDevice(ctypes.byref(device)), "the current device")
    major, minor = _attribute(driver, device, _MAJOR), _attribute(driver, device, _MINOR)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    image = _compile(source, [*options, *(f"-D{key}={value}" for key, value in defines.items())])
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, driver.cuModuleLoadData(ctypes.byref(module), image), "the compiled kernel")
    _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"the kernel {name}")
    return Kernel(driver, function, threads, _attribute(driver, device, _MULTIPROCESSORS))


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), which, device), f"device attribute {which}")
    return value.value


def _compile(source: str, options: Sequence[str]) -> bytes:
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gpu_kernel.cu", 0, None, None)
    if made:
        raise RunError(f"NVRTC made no program: error {made}", fix="check the installation of CUDA")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            log = _read(nvrtc, program, "nvrtcGetProgramLog")
            raise RunError(f"NVRTC refused the kernel:\n{log.decode(errors='replace')}", where=" ".join(options))
        return _read(nvrtc, program, "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, what)(program, text)
    return text.raw


def load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RunError(
            f"there is no CUDA driver here: {error}", fix="use a machine with an NVIDIA GPU, or another runtime"
        ) from error


def load_nvrtc() -> ctypes.CDLL:
    """As the loader finds it, else as torch's wheels or CUDA's own folder have it."""
    names = [f"libnvrtc.so.{major}" for major in (13, 12)]
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [path for name in names for folder in folders if folder.is_dir() for path in folder.glob(f"*/lib/{name}")]
    found += [path for name in names for path in Path("/usr/local").glob(f"cuda*/lib64/{name}")]
    for candidate in (*names, *found):
        try:
            # it opens its second part by name alone when it compiles, so that part must have been loaded from the same
            # folder
            if isinstance(candidate, Path):
                for builtins in candidate.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(candidate))
        except OSError:
            continue  # the next place may have it
    raise RunError(
        f"NVRTC was not found: neither {' nor '.join(names)}, in the loader's path, torch's wheels or /usr/local/cuda",
        fix="install CUDA, or the wheel nvidia-cuda-nvrtc",
    )


def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        driver.cuGetErrorString(code, ctypes.byref(text))
        told = [part.value.decode() for part in (name, text) if part.value]
        raise RunError(f"CUDA refused {what}: {', '.join(told) or code}")
