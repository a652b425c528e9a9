"""`python -m tilewire`: the console script, where it is not on the path."""

from tilewire._command import main

main()
