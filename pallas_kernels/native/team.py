"""The threads that share a kernel's work, and the block of memory where they meet.

A call is cut into units; the caller and its helpers claim one after the other.  Helpers are ours, one for each core but
the caller's: between the calls of a step they look out for the next one without sleeping, because a thread that has
been asleep comes too late for a call of 50 microseconds.  Long without one they do sleep, and an idle server costs
nothing.

One call at a time has the team; one that comes meanwhile does its work alone.  The caller hands over a job by opening
it, and closes it once all units are done; it leaves when no helper is inside, so nobody reads a job that has gone."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.native.code import ADDRESS, BIT, INT32, INT64, VOID, Code, intrinsic, number
from pallas_kernels.native.host import compiled, host, threads

WORDS = 14  # int64 a kernel may pass to its units, addresses among them
LOOKS = 50  # of a waiting thread, before it lets others run
ROUNDS = 1000  # of a helper's looking out, before it sleeps: about 2 ms

# Bytes into the meeting place; what different threads write stands in different cache lines.
_TAKEN, _OPEN, _INSIDE, _NEXT, _DONE, _SLEEPERS, _JOBS, _CORE, _WORKER, _UNITS, _FIRST_WORD, _MUTEX, _CONDITION, _CORES = (
    0, 64, 128, 192, 256, 320, 384, 392, 448, 456, 464, 640, 768, 896,
)  # fmt: skip
SIZE = 1024
CORES_SIZE = 128  # bytes of a set of cores, as Linux has it
IS_LINUX = sys.platform == "linux"  # elsewhere threads are not told which core they have

Work = Callable[[Code, Sequence[ir.Value], ir.Value], None]  # writes one unit: the call's words and the unit's number


def share(code: Code, worker: ir.Function, units: ir.Value, words: Sequence[ir.Value]) -> None:
    """Write the caller's part: all units are done when it goes on."""
    assert len(words) <= WORDS, f"{len(words)} words, at most {WORDS}"
    b = code.build
    meeting = b.inttoptr(number(meeting_place()), ADDRESS)
    with b.goto_entry_block():
        alone = b.bitcast(b.alloca(INT64, size=SIZE // 8), ADDRESS)
    has_team = _take(code, meeting, units)
    job = b.select(has_team, meeting, alone)
    for offset, value in ((_NEXT, number(0)), (_DONE, number(0)), (_UNITS, units)):
        code.set_field(job, offset, value)
    code.set_field(job, _WORKER, b.ptrtoint(worker, INT64))
    for index, word in enumerate(words):
        code.set_field(job, _FIRST_WORD + 8 * index, word)
    with b.if_then(has_team):
        which = b.add(code.field(job, _JOBS, INT64), number(1))
        code.set_field(job, _JOBS, which)
        if IS_LINUX:
            code.set_field(job, _CORE, _this_core(code))
        _store(code, job, _OPEN, which, "seq_cst")
        with b.if_then(b.icmp_signed(">", _load(code, job, _SLEEPERS, "seq_cst"), number(0)), likely=False):
            _call(code, "pthread_mutex_lock", job, _MUTEX)
            _call(code, "pthread_cond_broadcast", job, _CONDITION)
            _call(code, "pthread_mutex_unlock", job, _MUTEX)
            _yield(code)  # a helper that wakes up on this core leaves it
    b.call(worker, [job])
    _wait(code, lambda: b.icmp_signed(">=", _load(code, job, _DONE, "acquire"), units))
    with b.if_then(has_team):
        _store(code, job, _OPEN, number(0), "seq_cst")
        _wait(code, lambda: b.icmp_signed("==", _load(code, job, _INSIDE, "seq_cst"), number(0)))
        _store(code, job, _TAKEN, number(0), "release")


def _take(code: Code, meeting: ir.Value, units: ir.Value) -> ir.Value:
    """-> whether the team is this call's.  One unit needs none."""
    b = code.build
    start = b.block
    with b.if_then(b.icmp_signed(">", units, number(1))):
        taken = b.cmpxchg(code.place(meeting, _TAKEN, INT64), number(0), number(1), "acquire", "monotonic")
        is_free, asked = b.extract_value(taken, 1), b.block
    has_team = b.phi(BIT)
    has_team.add_incoming(number(0, BIT), start)
    has_team.add_incoming(is_free, asked)
    return has_team


def worker_of(module: ir.Module, name: str, work: Work, *, lanes: int) -> ir.Function:
    """worker(job): claims and does units until there are none left."""
    code = Code(module, name, [ADDRESS], lanes=lanes).private()
    b, job = code.build, code.arguments[0]
    units = code.field(job, _UNITS, INT64)
    words = [code.field(job, _FIRST_WORD + 8 * index, INT64) for index in range(WORDS)]
    claim, run, end = (b.append_basic_block(label) for label in ("claim", "run", "end"))
    b.branch(claim)
    b.position_at_end(claim)
    unit = b.atomic_rmw("add", code.place(job, _NEXT, INT64), number(1), "monotonic")
    b.cbranch(b.icmp_signed("<", unit, units), run, end)
    b.position_at_end(run)
    work(code, words, unit)
    b.atomic_rmw("add", code.place(job, _DONE, INT64), number(1), "release")
    b.branch(claim)
    b.position_at_end(end)
    b.ret_void()
    return code.function


@functools.cache
def meeting_place() -> int:
    """Its address.  The first call sends for the helpers.  Never freed: helpers live as long as the process."""
    library = ctypes.CDLL(None)
    library.calloc.restype, library.calloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
    address = -(-library.calloc(1, SIZE + 64) // 64) * 64
    library.pthread_mutex_init(ctypes.c_void_p(address + _MUTEX), None)
    library.pthread_cond_init(ctypes.c_void_p(address + _CONDITION), None)
    if IS_LINUX:
        cores = sum(1 << core for core in os.sched_getaffinity(0)).to_bytes(CORES_SIZE, "little")
        ctypes.memmove(address + _CORES, cores, CORES_SIZE)
    (entry,) = compiled(_helper_module(), "help")
    for _ in range(threads() - 1):
        # Not Python's: they never hold its lock, and it need not wait for them at its end.
        library.pthread_create(ctypes.byref(ctypes.c_void_p()), None, ctypes.c_void_p(entry), ctypes.c_void_p(address))
    return address


def _helper_module() -> ir.Module:
    """help(meeting): a helper's life."""
    module = ir.Module("jaxserve_team")
    code = Code(module, "help", [ADDRESS], lanes=host().lanes)
    b, meeting = code.build, code.arguments[0]
    look_out, enter, help_out, leave = (b.append_basic_block(label) for label in ("look_out", "enter", "help", "leave"))
    start = b.block
    b.branch(look_out)
    b.position_at_end(look_out)
    last = b.phi(INT64)  # job helped with
    last.add_incoming(number(0), start)
    _await_job(code, meeting, last)
    b.branch(enter)
    b.position_at_end(enter)
    b.atomic_rmw("add", code.place(meeting, _INSIDE, INT64), number(1), "seq_cst")
    which = _load(code, meeting, _OPEN, "seq_cst")
    b.cbranch(b.icmp_signed("!=", which, number(0)), help_out, leave)
    b.position_at_end(help_out)
    if IS_LINUX:
        _leave_core_of_caller(code, meeting)
    kind = ir.FunctionType(VOID, [ADDRESS]).as_pointer()
    b.call(b.inttoptr(code.field(meeting, _WORKER, INT64), kind), [meeting])
    b.branch(leave)
    b.position_at_end(leave)
    b.atomic_rmw("sub", code.place(meeting, _INSIDE, INT64), number(1), "seq_cst")
    last.add_incoming(which, leave)
    b.branch(look_out)
    return module


def _await_job(code: Code, meeting: ir.Value, last: ir.Value) -> None:
    """Until a job is open that is not the last one."""
    b = code.build
    found = b.append_basic_block("found")

    def look() -> None:
        which = _load(code, meeting, _OPEN, "acquire")
        is_new = b.and_(b.icmp_signed("!=", which, number(0)), b.icmp_signed("!=", which, last))
        go_on = b.append_basic_block("go_on")
        b.cbranch(is_new, found, go_on)
        b.position_at_end(go_on)

    with code.loop(number(0), number(ROUNDS)):
        with code.loop(number(0), number(LOOKS)):
            look()
            _relax(code)
        _yield(code)
    _call(code, "pthread_mutex_lock", meeting, _MUTEX)
    b.atomic_rmw("add", code.place(meeting, _SLEEPERS, INT64), number(1), "seq_cst")
    asleep, wake = b.append_basic_block("asleep"), b.append_basic_block("wake")
    b.branch(asleep)
    b.position_at_end(asleep)
    which = _load(code, meeting, _OPEN, "seq_cst")
    doze = b.append_basic_block("doze")
    b.cbranch(b.and_(b.icmp_signed("!=", which, number(0)), b.icmp_signed("!=", which, last)), wake, doze)
    b.position_at_end(doze)
    function = intrinsic(code.module, "pthread_cond_wait", INT32, [ADDRESS, ADDRESS])
    b.call(function, [code.at(meeting, _CONDITION), code.at(meeting, _MUTEX)])
    b.branch(asleep)
    b.position_at_end(wake)
    b.atomic_rmw("sub", code.place(meeting, _SLEEPERS, INT64), number(1), "seq_cst")
    _call(code, "pthread_mutex_unlock", meeting, _MUTEX)
    b.branch(found)
    b.position_at_end(found)


def _leave_core_of_caller(code: Code, meeting: ir.Value) -> None:
    """Linux may leave the two on one core for seconds while another is idle.  So the helper bars that core to itself, is
    moved at once, and lifts the bar."""
    b = code.build
    core = code.field(meeting, _CORE, INT64)
    with b.goto_entry_block():
        others = b.alloca(INT64, size=CORES_SIZE // 8)
    with b.if_then(b.icmp_signed("==", _this_core(code), core), likely=False):
        for index in range(CORES_SIZE // 8):
            b.store(code.field(meeting, _CORES + 8 * index, INT64), code.at(others, index))
        word = code.at(others, b.sdiv(core, number(64)))
        b.store(b.and_(b.load(word), b.not_(b.shl(number(1), b.srem(core, number(64))))), word)
        function = intrinsic(code.module, "sched_setaffinity", INT32, [INT32, INT64, ADDRESS])
        for cores in (b.bitcast(others, ADDRESS), code.at(meeting, _CORES)):
            b.call(function, [number(0, INT32), number(CORES_SIZE), cores])


def _this_core(code: Code) -> ir.Value:
    return code.build.sext(code.build.call(intrinsic(code.module, "sched_getcpu", INT32, []), []), INT64)


def _wait(code: Code, until: Callable[[], ir.Value]) -> None:
    b = code.build
    wait, end = b.append_basic_block("wait"), b.append_basic_block("waited")
    b.branch(wait)
    b.position_at_end(wait)
    with code.loop(number(0), number(LOOKS)):
        again = b.append_basic_block("again")
        b.cbranch(until(), end, again)
        b.position_at_end(again)
        _relax(code)
    _yield(code)  # to a helper that has lost its core, perhaps
    b.branch(wait)
    b.position_at_end(end)


def _yield(code: Code) -> None:
    code.build.call(intrinsic(code.module, "sched_yield", INT32, []), [])


def _relax(code: Code) -> None:
    if name := host().relax:
        code.build.call(intrinsic(code.module, name, VOID, []), [])


def _call(code: Code, name: str, meeting: ir.Value, offset: int) -> None:
    code.build.call(intrinsic(code.module, name, INT32, [ADDRESS]), [code.at(meeting, offset)])


def _load(code: Code, meeting: ir.Value, offset: int, ordering: str) -> ir.Value:
    return code.build.load_atomic(code.place(meeting, offset, INT64), ordering, 8)


def _store(code: Code, meeting: ir.Value, offset: int, value: ir.Value, ordering: str) -> None:
    code.build.store_atomic(value, code.place(meeting, offset, INT64), ordering, 8)
