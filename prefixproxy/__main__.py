"""`python -m prefixproxy` is the `prefixproxy` command."""

from prefixproxy.cli import main

if __name__ == "__main__":
    main()
