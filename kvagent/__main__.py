"""`python -m kvagent`."""

from kvagent.cli import main

main()
