"""Compiles a grammar first where it can do no harm: in a process of its own, with a vocabulary of bytes.

A grammar comes from a stranger, and its parser cannot be interrupted: forty bytes of schema (`multipleOf: 999983`) keep
it busy for eight seconds, a chain of four thousand rules overflows its stack and ends the process.  So what takes too
long, too much memory or too deep a stack there is refused here, and the engine compiles only what has been seen to
compile.  This file imports nothing of this project: the child runs it as a script."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 2.0  # of wall time for one grammar; its process is killed then
MASK_SECONDS = 0.1  # of CPU time for one mask over bytes, which takes 0.1 ms as a rule
MEMORY_MIB = 512  # of address space
STACK_MIB = 4  # a thread of the engine has 8
START_SECONDS = 60.0  # that the process may take to be ready
STEPS = 24  # characters of an answer that are tried
EOS = 256


def parser_limits() -> LLParserLimits:
    """Of every parser, there and in the engine.  A regular expression whose derivatives explode is given up after a
    fifth of the library's own fuel: at all of it, one mask takes a second."""
    return LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)


def error_of(matcher: LLMatcher) -> str:
    """The parser's reason on one line."""
    reason = " ".join(matcher.get_error().split("<non-verbose/>")[0].split("<backtrace>")[0].split())
    return "no text satisfies it" if reason == "NoExtensionBias" else reason


class Trial:
    """One child process, started when first needed and again after each that had to be killed.  Any thread may ask;
    they take turns."""

    def __init__(self, seconds: float = SECONDS, *, vocab: int = EOS + 1):
        """vocab: ids that a grammar may name; what they stand for is not known in a trial."""
        self._seconds = seconds
        self._vocab = max(vocab, EOS + 1)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def refusal(self, grammar: str) -> str | None:
        """Why this (llguidance) grammar cannot be used; None when it can."""
        with self._lock:
            child = self._child or self._start()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(grammar).encode() + b"\n")
                child.stdin.flush()
                answer = _read_line(child, self._seconds)
            except OSError:  # it died between two grammars
                answer = None
            if answer is None:
                self._stop()
                return (
                    f"the parser needs more than it is given ({self._seconds:g} s, {MEMORY_MIB} MiB, a stack of"
                    f" {STACK_MIB} MiB)"
                )
            return json.loads(answer)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", __file__, str(self._vocab)]
        # A session of its own: Ctrl-C is for the parent.  It ends when its input does.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._child = child
        if _read_line(child, START_SECONDS) is None:
            self._stop()
            raise RuntimeError(f"{' '.join(command)} did not start")
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _read_line(child: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """None when it takes longer, or when the child is dead."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return (child.stdout.readline() or None) if selector.select(seconds) else None


class _Bytes:
    """A vocabulary of single bytes, as TokenizerWrapper wants it; the ids past them stand for nothing."""

    eos_token_id, bos_token_id, special_token_ids = EOS, None, (EOS,)

    def __init__(self, vocab: int):
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [b""] * (vocab - EOS - 1)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def judge(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """Compiles, then tries the first characters of an answer, the least that may come each time."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    for _ in range(STEPS):
        if matcher.is_error():
            return error_of(matcher)
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.thread_time() - began > MASK_SECONDS:
            return f"one step of the parser takes more than {MASK_SECONDS:g} s"
        if matcher.is_stopped():
            return None if matcher.is_accepting() else error_of(matcher)
        visible = (mask & (1 << EOS) - 1) >> 33 << 33 or mask & (1 << EOS) - 1  # not a blank, if there is a choice
        if not visible:  # only the end is left
            return None
        matcher.consume_token((visible & -visible).bit_length() - 1)
    return error_of(matcher) if matcher.is_error() else None


def _serve(vocab: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB << 20, MEMORY_MIB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_MIB << 20)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(vocab)), eos_token=[EOS])
    _say("ready")
    for line in sys.stdin.buffer:
        worker = threading.Thread(target=lambda grammar: _say(judge(grammar, tokenizer)), args=(json.loads(line),))
        worker.start()
        worker.join()


def _say(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
