"""`python cli.py ...` from a checkout is `autotax ...`."""

from autotax.cli import main

raise SystemExit(main())
