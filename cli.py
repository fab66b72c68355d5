"""`python cli.py ...` from a checkout is `autotax ...`."""

from autotax.cli.start import main

raise SystemExit(main())
