"""What this machine's CPU has, and how a module of LLVM IR becomes a call that XLA knows by name."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass

import jax
from llvmlite import binding, ir


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU that runs the kernels."""

    name: str  # as LLVM calls it
    lanes: int  # float32 a vector register holds
    registers: int  # vector registers
    relax: str | None  # the intrinsic of a spinning thread's pause


@functools.cache
def host() -> Host:
    has = binding.get_host_cpu_features()
    arm = binding.get_default_triple().startswith(("aarch64", "arm64"))
    wide, middle = has.get("avx512f", False), has.get("avx2", False) and has.get("fma", False)
    relax = "llvm.x86.sse2.pause" if has.get("sse2", False) else None
    lanes = 16 if wide else 8 if middle else 4
    return Host(name=binding.get_host_cpu_name(), lanes=lanes, registers=32 if wide or arm else 16, relax=relax)


def threads() -> int:
    """That share a kernel's work: one for each core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def register(module: ir.Module, *names: str) -> None:
    """Compile a module and make its handlers XLA's custom calls of the same names."""
    for name, address in zip(names, compiled(module, *names), strict=True):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")


def compiled(module: ir.Module, *names: str) -> list[int]:
    """The addresses of these functions, compiled for this CPU."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    # LLVM prefers half of a 512-bit register by itself; these kernels are sized for all of it.
    features = binding.get_host_cpu_features().flatten() + (",-prefer-256-bit" if host().lanes == 16 else "")
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=host().name, features=features, opt=3, jit=True
    )
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # never freed: threads may be in its code until the very end
    return [engine.get_function_address(name) for name in names]
