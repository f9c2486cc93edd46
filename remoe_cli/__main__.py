"""The command `remoe`: runs the app and turns errors into one line and an exit code."""

import sys


def main() -> None:
    """Exit codes: 0 done, 1 a RemoeError, 2 wrong usage, 3 --fail-on-regress, 130 Ctrl-C."""
    from remoe_cli.errors import RemoeError

    try:
        from remoe_cli.cli import app

        app()
    except RemoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
