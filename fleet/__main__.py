"""`python -m fleet` is the `fleet` command."""

from fleet.cli import main

if __name__ == "__main__":
    main()
