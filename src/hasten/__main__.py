"""`python -m hasten` (and `accelerate launch -m hasten`) is the command line."""

from hasten.cli import main

main()
