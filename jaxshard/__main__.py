"""`python -m jaxshard`: the command line."""

from jaxshard.cli import main

if __name__ == "__main__":
    main()
