"""`python -m hybridmem` is the `hybridmem` command."""

from hybridmem.cli import main

if __name__ == "__main__":
    main()
