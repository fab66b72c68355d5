"""`python cli.py ...` from a checkout is `autotax ...`."""

from autotax.start import main

raise SystemExit(main())
