"""CUDA C++ kernels compiled at first use by the NVRTC that PyTorch brings: no toolkit, no build step.

Sources lie in `rl_engine/numerics/cuda/`; the constants of docs/numerics.md are put in front of them, so that
they have one home (:mod:`rl_engine.numerics.constants`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import torch
from torch import Tensor

from rl_engine.errors import UnsupportedError
from rl_engine.numerics import constants as C

__all__ = ["MIN_CAPABILITY", "Kernel", "compile_kernel", "missing_reason"]

MIN_CAPABILITY: Final = (9, 0)
"""Packed 16-bit minima, clusters and bulk copies: Hopper and later."""
_MAX_SHARED_MEMORY: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")


def missing_reason(capability: tuple[int, int] | None) -> str | None:
    """Why the kernels cannot run on a device of this compute capability; None where they can."""
    if capability is None or torch.version.cuda is None:
        return "needs an NVIDIA GPU and a CUDA build of PyTorch"
    if capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, v)) for v in (capability, MIN_CAPABILITY))
        return f"needs compute capability {need}, the device has {have}"
    try:
        _nvrtc()
        _driver()
    except OSError as error:
        return f"NVRTC or the CUDA driver cannot be loaded ({error})"
    return None


def _prelude() -> str:
    """The constants as macros."""

    def fp32(value: float) -> str:
        return f"({value.hex()}f)"

    macros: dict[str, str] = {
        "MAGIC": fp32(C.MAGIC),
        "CLAMP_BITS": fp32(float(C.CLAMP_BITS)),
        "MIN_LOG2_PROB": fp32(C.MIN_LOG2_PROB),
        "LN2_32": fp32(C.LN2_32),
        "LN2_64": f"({C.LN2_64.hex()})",
        "SQRT2": f"({C.SQRT2.hex()})",
        "EXP_L_HI": fp32(C.EXP_L_HI),
        "EXP_L_LO": fp32(C.EXP_L_LO),
        "EXP_MAX": fp32(C.EXP_MAX),
        "EXP_MIN": fp32(C.EXP_MIN),
        "EMPTY_EXPONENT": f"({C.EMPTY_EXPONENT})",
        "OVER_EXPONENT": f"({C.OVER_EXPONENT})",
        "MAX_EXPONENT": f"({C.MAX_EXPONENT})",
        "FLAG_POSINF": f"{C.FLAG_POSINF}ll",
        "FLAG_OWNED": f"{C.FLAG_OWNED}ll",
    }
    macros |= {f"POLY_{i}": fp32(c) for i, c in enumerate(C.EXP2_POLY)}
    macros |= {f"PHI_{i}": fp32(c) for i, c in enumerate(C.PHI_POLY)}
    macros |= {f"LOG2_{i}": f"({c.hex()})" for i, c in enumerate(C.LOG2_POLY)}
    macros |= {f"DIGIT_{i}": fp32(c) for i, c in enumerate(C.DIGIT_MAGIC)}
    macros |= {f"DIGIT_BITS_{i}": str(c) for i, c in enumerate(C.DIGIT_MAGIC_BITS)}
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


def source(*names: str) -> str:
    """The text of a kernel: constants, then the named files of the folder `cuda`."""
    folder = files("rl_engine.numerics").joinpath("cuda")
    return _prelude() + "".join(folder.joinpath(name).read_text() for name in names)


class Kernel:
    """A compiled kernel, loaded into one device's context.

    Args:
        function: CUfunction handle.
        shared_bytes: of dynamic shared memory a block.
    """

    def __init__(self, function: ctypes.c_void_p, shared_bytes: int) -> None:
        self._function = function
        self._shared_bytes = shared_bytes
        self._clusters: dict[tuple[int, int], int] = {}
        if shared_bytes > 48 * 1024:
            _check(_driver().cuFuncSetAttribute(function, _MAX_SHARED_MEMORY, shared_bytes))

    def __call__(self, grid: tuple[int, int], threads: int, *args: Any) -> None:
        """Launch on the current stream. Tensors are passed as pointers; the rest are ctypes values."""
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = _driver().cuLaunchKernel
        _check(launch(self._function, *grid, 1, threads, 1, 1, self._shared_bytes, stream, pointers, None))

    def max_clusters(self, threads: int, blocks: int) -> int:
        """How many clusters of `blocks` blocks run at once: fewer than the multiprocessors suggest."""
        key = (threads, blocks)
        if key not in self._clusters:
            config = _LaunchConfig(blocks, 1, 1, threads, 1, 1, self._shared_bytes, None, None, 0)
            attribute = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(blocks, 1, 1))
            config.attributes, config.num_attributes = ctypes.pointer(attribute), 1
            count = ctypes.c_int()
            query = _driver().cuOccupancyMaxActiveClusters
            _check(query(ctypes.byref(count), self._function, ctypes.byref(config)))
            self._clusters[key] = max(1, count.value)
        return self._clusters[key]


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@cache
def _binary(names: tuple[str, ...], architecture: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    text = source(*names).encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, names[-1].encode(), 0, None, None):
        raise UnsupportedError("NVRTC cannot create a program; check the CUDA installation of PyTorch")
    options = [f"--gpu-architecture={architecture}", "-fmad=false", "-std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines]
    encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    if status:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedError(
            f"NVRTC {torch.version.cuda} cannot compile {names[-1]}:\n{log.value.decode()}"
        )
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


@cache
def _load(
    device: int, names: tuple[str, ...], entry: str, shared_bytes: int, defines: tuple[tuple[str, int], ...]
) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the primary context current
        torch.empty(0, device="cuda")
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        binary = _binary(names, f"sm_{major}{minor}", defines)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()))
        return Kernel(function, shared_bytes)


def compile_kernel(
    device: torch.device, names: Sequence[str], entry: str, shared_bytes: int = 0, **defines: int
) -> Kernel:
    """The kernel `entry` of the named sources with these macros; compiled and loaded once a device."""
    index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    return _load(index, tuple(names), entry, shared_bytes, tuple(sorted(defines.items())))
