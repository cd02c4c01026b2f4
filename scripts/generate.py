"""The command-line client: a prompt to a running server, the answer to the terminal as it comes.

    python scripts/generate.py --max-tokens 8 --temperature 0 "The capital of France is"

Exit codes: 0 answered, 1 the server or the request failed (one sentence on stderr says how), 2 wrong flags,
130 Ctrl-C (the request is aborted).  Imports neither jax nor the engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import _path  # noqa: F401  first: it makes the imports of server work

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would join our one sentence

import grpc
from google.protobuf.json_format import MessageToJson

from server.args import Parser
from server.pb.jaxserve.v1 import generation_pb2 as pb
from server.pb.jaxserve.v1 import generation_pb2_grpc as pb_grpc

MAX_MESSAGE = 2**30 - 1  # the server states its own, smaller limit

# One flag for each field of SamplingParams: name, type, help.  A list is repeated or comma-separated as the help says.
NUMBERS = (
    ("max-tokens", int, "most tokens to generate; default: as many as the context allows"),
    ("min-tokens", int, "no end before this many tokens"),
    ("n", int, "samples to draw"),
    ("temperature", float, "0 = greedy; default 1"),
    ("top-k", int, "draw from the k most likely tokens; 0 = off"),
    ("top-p", float, "draw from the smallest set with this probability; 1 = off"),
    ("min-p", float, "drop tokens below this share of the most likely one's probability; 0 = off"),
    ("presence-penalty", float, "-2 to 2, for tokens generated already"),
    ("frequency-penalty", float, "-2 to 2, for each time a token was generated"),
    ("repetition-penalty", float, "for tokens of prompt and answer; 1 = off"),
    ("seed", int, "makes a sampled answer repeatable"),
    ("logprobs", int, "print each token's logprob and this many alternatives on stderr"),
    ("prompt-logprobs", int, "the same for the prompt's tokens"),
    ("prompt-logprobs-start", int, "first prompt position that gets them"),
)
SWITCHES = (
    ("include-stop-str-in-output", "keep the stop string in the text"),
    ("ignore-eos", "go on past end-of-sequence tokens"),
    ("detokenize", "text; --no-detokenize prints token ids"),
    ("skip-special-tokens", "leave control tokens out of the text"),
    ("speculate", "let a server that has a draft use it"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(argv)
    try:
        return ask(request_of(flags), flags)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def ask(request: pb.GenerateRequest, flags: argparse.Namespace) -> int:
    """Sends the request and shows what comes.  -> the exit code."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE)]
    with grpc.insecure_channel(flags.address, options=options) as channel:
        call = pb_grpc.GenerationStub(channel).GenerateStream(request, timeout=flags.timeout)
        try:
            show = show_json if flags.json else show_one if request.params.n <= 1 else show_many
            show(call, text_of if flags.detokenize is not False else ids_text_of)
            return 0
        except KeyboardInterrupt:
            return stop(call, 130)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return stop(call, 1)
        except grpc.RpcError:  # the call itself says what happened
            sys.stdout.flush()
            print(f"generate: {sentence(call, flags.address)}", file=sys.stderr)
            return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("Ask a running jaxserve server.")
    parser.add_argument("prompt", nargs="?", help="the prompt; - or none = stdin")
    parser.add_argument("--address", default="127.0.0.1:50051", help="of the server (default: %(default)s)")
    parser.add_argument("--timeout", type=float, help="seconds until the request is given up")
    parser.add_argument("--json", action="store_true", help="print every message of the stream as one line of JSON")
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message; the model's template is used"
    )
    group.add_argument("--system", help="system message before it; implies --chat")
    group.add_argument("--token-ids", action="store_true", help="the prompt is a list of token ids: 504,3575,282")
    group.add_argument("--id", help="of the request; default: one the server draws")
    group.add_argument("--priority", type=int, default=0, help="higher goes first")
    group.add_argument("--cache-salt", default="", help="prefixes are shared only within one salt")
    group = parser.add_argument_group("sampling")
    for name, kind, text in NUMBERS:
        group.add_argument(f"--{name}", type=kind, help=text)
    for name, text in SWITCHES:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    group.add_argument("--stop", action="append", help="a text that ends the answer; may be repeated")
    for name in ("stop-token-ids", "allowed-token-ids", "banned-token-ids"):
        group.add_argument(f"--{name}", type=ids_of, metavar="IDS", help="token ids, separated by commas")
    group.add_argument("--logit-bias", type=biases_of, metavar="ID=BIAS,...", help="added to these tokens' logits")
    group.add_argument("--bad-words", action="append", help="a text that is never written; may be repeated")
    group.add_argument(
        "--structured-outputs",
        type=structured_of,
        metavar="JSON",
        help='what the answer must match, one of {"json": SCHEMA}, {"regex": ...}, {"choice": [...]}, {"grammar": ...},'
        ' {"json_object": true}',
    )
    return parser


def ids_of(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def biases_of(text: str) -> dict[int, float]:
    pairs = (part.split("=") for part in text.replace(",", " ").split())
    return {int(token_id): float(bias) for token_id, bias in pairs}


def structured_of(text: str) -> pb.StructuredOutputs:
    given = json.loads(text)
    if isinstance(given, dict) and isinstance(given.get("json"), dict):
        given["json"] = json.dumps(given["json"])
    return pb.StructuredOutputs(**given)


def request_of(flags: argparse.Namespace) -> pb.GenerateRequest:
    """Only what was given is set; everything else is the server's default."""
    names = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    if "seed" in given:
        given["seed"] %= 2**64
    params = pb.SamplingParams()
    for name, value in given.items():
        try:
            params.MergeFrom(pb.SamplingParams(**{name: value}))
        except (ValueError, TypeError) as error:  # protobuf does not say which field
            raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
    request = pb.GenerateRequest(id=flags.id or "", params=params, priority=flags.priority, cache_salt=flags.cache_salt)
    prompt = read_stdin() if flags.prompt in (None, "-") else flags.prompt
    if flags.token_ids and (flags.chat or flags.system is not None):
        raise ValueError("--token-ids and --chat exclude each other")
    if flags.token_ids:
        request.token_ids.ids.extend(ids_of(prompt))
        request.token_ids.SetInParent()
    elif flags.chat or flags.system is not None:
        if flags.system is not None:
            request.chat.messages.add(role="system", content=flags.system)
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request


def read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument or on stdin")
    return sys.stdin.buffer.read().decode("utf-8")


Render = Callable[[pb.Output], str]


def show_one(call: Iterable[pb.Output], render: Render) -> None:
    """Text as it comes."""
    last = ""
    for message in call:
        text = render(message)
        print(text, end="", flush=True)
        last = text or last
        tell_logprobs(message)
    if not last.endswith("\n"):
        print(flush=True)


def show_many(call: Iterable[pb.Output], render: Render) -> None:
    """Samples one after another, each whole, in order."""
    texts: dict[int, list[str]] = {}
    for message in call:
        texts.setdefault(message.index, []).append(render(message))
        tell_logprobs(message)
    for index in sorted(texts):
        print(f"--- {index} ---\n{''.join(texts[index])}", flush=True)


def show_json(call: Iterable[pb.Output], render: Render) -> None:
    """Everything, whatever `render` makes of it."""
    for message in call:
        print(MessageToJson(message, indent=None, preserving_proto_field_name=True, ensure_ascii=False), flush=True)


def text_of(message: pb.Output) -> str:
    return message.text


def ids_text_of(message: pb.Output) -> str:
    return "".join(f"{token_id} " for token_id in message.token_ids)


def tell_logprobs(message: pb.Output) -> None:
    for kind, entries in (("prompt", message.prompt_logprobs), ("token", message.logprobs)):
        for entry in entries:
            if entry.HasField("logprob"):
                rest = zip(entry.top_ids, entry.top_bytes, entry.top_logprobs, strict=True)
                top = "  ".join(f"{token_id} {name!r} {logprob:.4f}" for token_id, name, logprob in rest)
                print(
                    f"{kind} {message.index}: {entry.token_id} {entry.token_bytes!r} {entry.logprob:.4f}"
                    f" rank {entry.rank}  {top}".rstrip(),
                    file=sys.stderr,
                )


def sentence(call: grpc.Call, address: str) -> str:
    """What went wrong, for a person.  A status without the server's own mark comes from the transport."""
    code, details = call.code(), call.details()
    is_servers_word = any(key == "jaxserve-code" for key, _ in call.trailing_metadata() or ())
    if code is grpc.StatusCode.UNAVAILABLE and not is_servers_word and call.initial_metadata():
        return f"the connection to {address} was lost"
    if code is grpc.StatusCode.UNAVAILABLE and not is_servers_word:
        return f"no server answers at {address} (start one with: python scripts/serve.py)"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the --timeout passed before the answer was complete"
    return f"{details} ({code.name})"


def stop(call: grpc.Call, code: int) -> int:
    """Cancels the request and waits until the server has been told."""
    call.cancel()
    call.code()
    return code


if __name__ == "__main__":
    sys.exit(main())
