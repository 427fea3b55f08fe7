"""The command line: `jaxformer VERB …`, each verb a thin face on the rooms of the package."""

import keyword
import sys
import warnings
from importlib import import_module

from jaxformer.cli.arguments import UsageError

VERBS = {
    "train": "train a model on text (by default on the Python standard library) or on pairs",
    "generate": "continue a prompt with a trained run",
    "translate": "translate the lines of standard input",
    "fill": "fill in what is hidden in a text",
    "evaluate": "how well a run does on files: loss, bits per byte, BLEU",
    "compare": "runs beside one another: settings, figures and a picture",
    "import": "read a checkpoint in Hugging Face's format and keep it in ours",
    "export": "write a model as transformers, or llama.cpp, opens it",
    "doctor": "what is here, and what a model needs of machines that are not",
    "verify": "hold a run to ten properties: causal, cached = full, padded = alone, …",
}

_USAGE = "\n".join(
    [
        "usage: jaxformer VERB …",
        "",
        *(f"  {verb:10} {what}" for verb, what in VERBS.items()),
        "",
        "jaxformer VERB --help lists what a verb accepts. --debug shows the traceback of an error.",
    ]
)


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns the exit status: 0, 1 (it failed), 2 (bad input), 130 (Ctrl-C)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout.errors == "strict":  # a character that it cannot show must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        from jaxformer import __version__

        print(__version__)
        return 0
    if argv[0] not in VERBS:
        return _fail(f"verb is {argv[0]!r}; it must be one of {', '.join(VERBS)}", 2)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            module = argv[0] + "_" * keyword.iskeyword(argv[0])
            return import_module(f"jaxformer.cli.{module}").main(argv[1:]) or 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone: nothing is left to say
        return 1
    except (ValueError, UsageError) as error:
        if debug:
            raise
        return _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        status = getattr(error, "status", 1)
        return _fail(str(error) or type(error).__name__, status)


def _fail(message: str, status: int) -> int:
    """One line on standard error."""
    _say(message)
    return status


def _warn(message, *_) -> None:
    """In the place of `warnings.showwarning`: one line, without the code that it came from."""
    _say(f"warning: {message}")


def _say(message: str) -> None:
    """One line on standard error; within its lines the message is shown as it is."""
    lines = (line.strip() for line in message.splitlines())
    print(f"jaxformer: {' '.join(line for line in lines if line)}", file=sys.stderr)
