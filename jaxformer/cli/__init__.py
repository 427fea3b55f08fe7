"""The command line `jaxformer VERB …`. Each subcommand is a module."""

import keyword
import sys
import warnings
from importlib import import_module
from io import TextIOWrapper
from traceback import format_exception
from types import TracebackType

from jaxformer.terminal import did_you_mean, say, visible

VERBS = {
    "train": "train a model on text (by default on the Python standard library) or on pairs",
    "sweep": "train a model once for each combination of settings, and compare the runs",
    "generate": "continue a prompt, or each prompt of a file, with a trained model",
    "chat": "talk to a model that was tuned on conversations",
    "translate": "translate the lines of files or of standard input",
    "fill-mask": "predict the masked tokens of a text with a trained encoder",
    "evaluate": "score a model on files: loss, bits per byte, BLEU",
    "compare": "compare runs: settings, results and a picture of the losses",
    "explain": "write an interactive HTML page about a model and a text",
    "import": "convert a checkpoint from Hugging Face format to jaxformer's format",
    "export": "write a model in the format of transformers, PEFT or llama.cpp",
    "doctor": "show this machine's setup, or what a model needs on another machine",
    "bench": "measure this machine's speed at training, decoding and attention",
    "verify": "check properties of a model, such as causality and determinism",
    "plot-attention": "draw the attention weights of each head for one text",
}


def _usage() -> str:
    from jaxformer.cli.help import format_table

    return f"""usage: jaxformer VERB …

{format_table(VERBS)}

jaxformer VERB --help lists the options of a verb.
jaxformer VERB --debug shows the traceback of an error."""


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: The command-line arguments after `jaxformer`. If None, `sys.argv[1:]` is used.

    Returns:
        The exit status: 0, 1 (failure), 2 (bad input), 130 (Ctrl-C), or the error's `status`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # A character that the terminal cannot encode must not raise an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if debug:
        sys.excepthook = _show_traceback
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from jaxformer import __version__

        say(__version__)
        return 0
    if argv[0] not in VERBS:
        meant = did_you_mean(argv[0], VERBS) or f"; the verbs are {', '.join(VERBS)}"
        return _fail(f"unknown verb {argv[0]!r}{meant}", 2)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            module = argv[0].replace("-", "_") + "_" * keyword.iskeyword(argv[0])
            return import_module(f"jaxformer.cli.{module}").main(argv[1:]) or 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The process that reads the output has exited. If stderr were open, Python would print a
        # message about the broken pipe at exit.
        sys.stderr.close()
        return 1
    except Exception as error:
        if debug:
            raise
        status = 2 if isinstance(error, ValueError) else getattr(error, "status", 1)
        return _fail(str(error) or type(error).__name__, status)


def _fail(message: str, status: int) -> int:
    """Prints the message and returns the exit status."""
    _say(message)
    return status


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Replaces `warnings.showwarning`: prints one line, without the source line of the warning."""
    _say(f"warning: {message}")


def _say(message: str) -> None:
    """Prints the message as one line on standard error."""
    lines = (line.strip() for line in visible(message).splitlines())
    say(f"jaxformer: {' '.join(line for line in lines if line)}", sys.stderr)


def _show_traceback(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Replaces `sys.excepthook`: prints the traceback with control characters as escapes.

    An error message may quote control characters from an untrusted file.
    """
    say("".join(format_exception(kind, error, traceback)).rstrip("\n"), sys.stderr)
