"""``python -m shoal``: the command line where no console script is installed, and what ``torchrun -m shoal`` starts."""

from shoal.cli.main import main

main()
