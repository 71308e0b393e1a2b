"""``kvgrpc`` and ``python -m kvgrpc``: the command, or one line that says what it lacks."""

import sys
from importlib.util import find_spec

NEEDS = ("click", "rich")
# As every other feature that is not built in: 64 + UNIMPLEMENTED.
FEATURE_DISABLED = 76


def main() -> None:
    """Run the command. Engines install kvgrpc without it: then name the extra that has it, and end."""
    lacking = [name for name in NEEDS if find_spec(name) is None]
    if lacking:
        print(f"kvgrpc: the command needs {' and '.join(lacking)}: pip install 'kvgrpc[cli]'", file=sys.stderr)
        sys.exit(FEATURE_DISABLED)
    from kvgrpc.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
