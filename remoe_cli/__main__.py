"""The command `remoe`: runs the app and turns errors into one line and an exit code."""

import os
import signal
import sys
import traceback
from threading import Timer
from types import FrameType

_interrupts = 0


def main() -> None:
    """Exit codes: 0 done, 1 a RemoeError, 2 wrong usage, 3 --fail-on-regress, 130 Ctrl-C."""
    global _interrupts
    _interrupts = 0
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    try:
        _run()
    except BaseException as error:
        swallowed = _interrupts and not isinstance(error, SystemExit)  # a library made its own error of it
        if swallowed or _comes_from_ctrl_c(error):
            _leave()
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done or said; the interpreter's own end is not cut short


def _comes_from_ctrl_c(error: BaseException | None) -> bool:
    """Also where the command line's library turned it into an exit; not where a verb saved its work and exits itself."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _run() -> None:
    from remoe_cli.errors import RemoeError

    try:
        from remoe_cli.cli import app

        app()
    except RemoeError as error:
        if _interrupts:
            raise
        _where(error)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        from remoe_cli.environment import out_of_memory

        if _interrupts or not out_of_memory(error):
            raise
        _where(error)
        smaller = "finetune: --set train.micro_batch=1 or a smaller train.sequence; decode: a smaller --cache"
        print(f"error: out of memory; nothing was changed. Try: less at once ({smaller})", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if _interrupts or error.strerror is None:
            raise
        _where(error)
        name = f" ({str(error.filename)[:200]!r})" if error.filename else ""
        print(f"error: {error.strerror}{name}. Try: another path, or mend this one", file=sys.stderr)
        sys.exit(1)


def _where(error: BaseException) -> None:
    """With --verbose: the way to the error, before its line."""
    from remoe_cli import console

    if console.verbose():
        traceback.print_exception(error)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """The first Ctrl-C ends the work in order; a second one does not wait for that."""
    global _interrupts
    _interrupts += 1
    if _interrupts > 1:
        os._exit(130)
    raise KeyboardInterrupt


def _unraisable(told: "sys.UnraisableHookArgs") -> None:
    """Python drops what is raised in a destructor, a Ctrl-C too: that comes again a moment later, outside of it."""
    global _interrupts
    if isinstance(told.exc_value, KeyboardInterrupt):
        _interrupts -= 1
        Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(told)


def _leave() -> None:
    """Without the interpreter's own end, which waits for threads that libraries left behind."""
    print("Interrupted.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130)


if __name__ == "__main__":
    main()
