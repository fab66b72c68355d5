"""`python -m autotax ...` is `autotax ...`."""

from autotax.cli import main

raise SystemExit(main())
