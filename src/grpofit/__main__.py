"""`python -m grpofit`: the command line. Owns nothing else."""

from grpofit.cli import main

if __name__ == "__main__":
    main()
