"""Kernels for the CPU's own vector unit: Pallas has no backend there, so they are written as LLVM IR by hand.

`code` says how a kernel is written, `host` what the CPU has and how a module becomes machine code, `ffi` how XLA calls
it, over all of its threads.  Needs llvmlite (`pip install '.[cpu]'`); nothing here is imported unless the `native`
backend is chosen."""
